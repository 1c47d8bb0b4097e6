"""Links of a page to a module of the package lead to its page in the reference; those to other files of the repository become plain text."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text with such links replaced. page: whose path tells which links leave the folder of the docs."""
    here = PurePosixPath("docs", page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        parts = list(here.parts)
        for part in PurePosixPath(match[2].partition("#")[0]).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        if parts[0] == "docs":
            return match[0]
        if parts[0] == "megatron" and parts[-1].endswith(".py"):
            up = "../" * (len(here.parts) - 1)
            return f"[{match[1]}]({up}reference/{'/'.join(parts)[:-3]}.md)"
        return match[1]

    return _OUTSIDE.sub(replaced, markdown)
