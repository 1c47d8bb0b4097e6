"""Join all .bin/.idx pairs of a folder, in the order of their names, into one pair.

    python tools/merge_datasets.py --input parts --output-prefix whole
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

if importlib.util.find_spec("megatron") is None:  # run from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets.indexed import DataError, IndexedDataset, IndexedDatasetBuilder, bin_path, idx_path


def pairs_in(folder: Path) -> list[str]:
    """The prefixes of all pairs in a folder, sorted."""
    if not folder.is_dir():
        raise DataError(f"--input {folder} is not a folder")
    found = {ending: {path.name[: -len(ending)] for path in folder.glob(f"*{ending}")} for ending in (".bin", ".idx")}
    for ending, other in ((".bin", ".idx"), (".idx", ".bin")):
        for name in sorted(found[ending] - found[other]):
            raise DataError(f"{folder / name}{ending} has no {other} beside it; add it, or move the file away")
    if not found[".idx"]:
        raise DataError(f"--input {folder} holds no .bin/.idx pair")
    return [str(folder / name) for name in sorted(found[".idx"])]


def merge(folder: Path, output_prefix: str) -> str:
    """Join the pairs. Returns a line that says what was joined."""
    prefixes = pairs_in(folder)
    if Path(output_prefix).resolve() in [Path(prefix).resolve() for prefix in prefixes]:
        raise DataError(f"--output-prefix {output_prefix} is one of the pairs to join; choose another name")
    dtype = IndexedDataset(prefixes[0]).dtype
    with IndexedDatasetBuilder(output_prefix, dtype) as builder:
        for prefix in tqdm(prefixes, unit="pair", disable=not sys.stderr.isatty()):
            builder.add_index(prefix)
    return (f"{len(prefixes)} pairs, {builder.num_documents} documents, {builder.num_tokens} tokens -> "
            f"{bin_path(output_prefix)}, {idx_path(output_prefix)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, type=Path, metavar="DIR", help="folder with the pairs")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX",
                        help="the files are PREFIX.bin and PREFIX.idx")
    args = parser.parse_args(arguments)
    try:
        print(merge(args.input, args.output_prefix))
    except (DataError, OSError) as error:
        sys.exit(f"merge_datasets.py: {error}")


if __name__ == "__main__":
    main()
