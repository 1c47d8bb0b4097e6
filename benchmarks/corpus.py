"""A corpus of real English for benchmarks, out of Debian's documentation packages: JSON lines with the key "text".

    python benchmarks/corpus.py runs/corpus runs/corpus.jsonl [--megabytes 500]

Needs apt-get (with its lists up to date) and dpkg-deb; packages are unpacked into the first folder, and nothing is
installed. About 170 MB; --megabytes repeats the documents until the file is so large. The texts have licences of their
own (GPL-2 and others) and are not to be passed on.
"""

import argparse
import gzip
import html
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    "linux-doc-6.1",
    "python3.11-doc",
    "libreoffice-help-en-us",
    "debian-handbook",
    "anarchism",
    "dict-gcide",
    "wordnet-base",
)
SHORTEST, DICTIONARY_DOCUMENT = 200, 4000  # characters
NOT_TEXT = re.compile(r"<(script|style|head)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
BREAK = re.compile(r"</?(?:p|br|div|h[1-6]|li|tr|pre)\b[^>]*>", re.IGNORECASE)
TAG = re.compile(r"<[^>]*>")


def unpack(package: str, folder: Path) -> Path:
    """The files of a package."""
    unpacked = folder / package
    if not unpacked.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        archive = next(folder.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
    return unpacked


def read(path: Path) -> str | None:
    """The text of a file; None when it is none."""
    try:
        with gzip.open(path, "rb") if path.suffix in (".gz", ".dz") else open(path, "rb") as file:
            return file.read().decode()
    except (OSError, UnicodeDecodeError):
        return None


def plain(page: str) -> str:
    """The words of an HTML page."""
    text = html.unescape(TAG.sub("", BREAK.sub("\n", NOT_TEXT.sub("", page))))
    return re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text))


def pieces(text: str) -> Iterator[str]:
    """A dictionary, some entries at a time."""
    some: list[str] = []
    size = 0
    for entry in re.split(r"\n(?=\S)", text):
        some.append(entry)
        size += len(entry)
        if size > DICTIONARY_DOCUMENT:
            yield "\n".join(some)
            some, size = [], 0
    yield "\n".join(some)


def documents(package: str, folder: Path) -> Iterator[str]:
    """The texts of a package, in the order of its file names."""
    for path in sorted(unpack(package, folder).rglob("*")):
        name = path.name.removesuffix(".gz")
        if not path.is_file() or path.is_symlink() or "translations" in path.parts:
            continue
        if name.endswith((".rst", ".txt")) or (package.startswith("linux-doc") and "." not in name):
            yield read(path) or ""
        elif name.endswith(".html") and package != "python3.11-doc":  # whose pages are there as .txt too
            yield plain(read(path) or "")
        elif name.endswith(".dict.dz") or (package == "wordnet-base" and name.startswith("data.")):
            yield from pieces(read(path) or "")


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where packages are unpacked")
    parser.add_argument("output", type=Path, help="the JSON lines")
    parser.add_argument("--megabytes", type=float, default=0, help="repeat the documents until the file is so large")
    args = parser.parse_args()
    with open(args.output, "w", encoding="utf-8") as file:
        for package in PACKAGES:
            for text in documents(package, args.folder):
                if len(text.strip()) >= SHORTEST:
                    file.write(json.dumps({"source": package, "text": text.strip()}, ensure_ascii=False) + "\n")
    once = args.output.read_bytes()
    with open(args.output, "ab") as file:
        while file.tell() < args.megabytes * 1e6:
            file.write(once)
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
