"""Write what the parsers of Megatron-LM's releases hold before a word is given: `arguments.json.gz`, read by `parser_defaults.py`.

    python dump_arguments.py CLONE RELEASE ...      CLONE: a git clone of Megatron-LM; RELEASE: 0.12.3, ..., or main

One process a release runs its parser with the shims of `run_pretrain.py`; the releases that are not named are kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
FILE = HERE / "arguments.json.gz"


def sources(clone: Path, release: str, folder: Path) -> Path:
    """The sources of a release, out of a clone, in a folder; returns the folder."""
    tag = release if release == "main" else f"core_v{release}"
    archive = subprocess.run(["git", "-C", str(clone), "archive", tag], check=True, capture_output=True).stdout
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def plain(value: Any) -> Any:
    """A value as JSON has it; of classes their name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else getattr(value, "name", str(value))


def dump(folder: Path) -> None:
    """Print the defaults of the parser of one release's sources."""
    from run_pretrain import prepare

    prepare(folder)
    from megatron.training.arguments import add_megatron_arguments

    found = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
    print(json.dumps({name: plain(value) for name, value in sorted(vars(found).items())}))


def main(clone: Path, releases: list[str]) -> None:
    """Renew releases of the file."""
    found = json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            place = sources(clone, release, Path(folder))
            shown = subprocess.run([sys.executable, __file__, "--dump", str(place)], check=True, capture_output=True)
        found[release] = json.loads(shown.stdout.splitlines()[-1])
    FILE.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    if sys.argv[1] == "--dump":
        dump(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
