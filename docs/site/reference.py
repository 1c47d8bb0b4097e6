"""Writes a page for every module of the package, which mkdocstrings fills from the docstrings, and a page that lists them all."""

from __future__ import annotations

from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron",)


def modules() -> list[Path]:
    """Every module of the product, relative to the root; packages are their `__init__.py`."""
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


lines = ["# Reference", "", "Every module, from its docstrings.", ""]
for path in modules():
    parts = path.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    page = Path("reference", *path.parent.parts, "index.md" if parts[-1] == "__init__" else f"{path.stem}.md")
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(f"# {name}\n\n::: {name}\n")
    lines.append(f"{'    ' * (name.count('.'))}- [{name}]({page.relative_to('reference').as_posix()})")
with mkdocs_gen_files.open("reference/index.md", "w") as file:
    file.write("\n".join(lines) + "\n")
