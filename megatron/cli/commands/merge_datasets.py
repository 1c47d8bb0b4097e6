"""Join .bin/.idx pairs into one, in order: all of a folder by their names, or those given.

    python tools/merge_datasets.py --input parts --output-prefix whole
    python tools/merge_datasets.py --prefixes parts/b parts/a --output-prefix whole

Shards that tools/preprocess_data.py --shard wrote are joined by their numbers, and must all be there; the result has the
bytes of one run. The ids are copied in pieces, so memory does not grow with them, and the pair appears when complete.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.datasets import sidecar
from megatron.core.datasets.indexed import DataError, IndexedDataset, IndexedDatasetBuilder, bin_path, idx_path
from megatron.core.datasets.sidecar import DatasetSidecar, describe_tokenizer
from megatron.training.launch.launch_info import install_interrupt_excepthook

SHOWN = 10  # missing shards that are named


def find_pairs_in_folder(folder: Path) -> list[str]:
    """Return the prefixes of a folder's pairs, sorted. `DataError` if there is none, or a file lacks its other half."""
    if not folder.is_dir():
        raise DataError(f"--input {folder} is not a folder")
    names = {ending: {path.name[: -len(ending)] for path in folder.glob(f"*{ending}")} for ending in (".bin", ".idx")}
    for ending, other in ((".bin", ".idx"), (".idx", ".bin")):
        for name in sorted(names[ending] - names[other]):
            raise DataError(f"{folder / name}{ending} has no {other} beside it; add it, or move the file away")
    if not names[".idx"]:
        raise DataError(f"--input {folder} holds no .bin/.idx pair")
    return [str(folder / name) for name in sorted(names[".idx"])]


def first_disagreement_text(facts: Mapping[str, object], what: str, describe: Callable[[object], str]) -> Iterator[str]:
    """Yield a sentence on the first two pairs whose facts differ, if any; None is unknown. what: its verb."""
    known = [(prefix, fact) for prefix, fact in facts.items() if fact is not None]
    for (first, fact), (second, other) in zip(known, known[1:]):
        if fact != other:
            yield f"{first} {what} {describe(fact)}, {second} {describe(other)}; pairs that are joined must agree"
            return


def shard_problems(shards: Mapping[str, tuple[int, int] | None]) -> Iterator[str]:
    """Yield what is wrong with the shards among the pairs: missing, repeated, or mixed with other pairs."""
    given = {prefix: shard for prefix, shard in shards.items() if shard is not None}
    if not given:
        return
    if len(given) < len(shards):
        whole = next(prefix for prefix in shards if prefix not in given)
        yield f"{next(iter(given))} is a shard, {whole} is none; join the shards first"
        return
    counts = sorted({count for _, count in given.values()})
    if len(counts) > 1:
        yield f"there are shards of {' and '.join(map(str, counts))}; give those of one run"
        return
    holders: dict[int, list[str]] = {}
    for prefix, (index, _) in given.items():
        holders.setdefault(index, []).append(prefix)
    missing = [index for index in range(counts[0]) if index not in holders]
    if missing:
        more = f" and {len(missing) - SHOWN} more" * (len(missing) > SHOWN)
        yield f"of {counts[0]} shards, {', '.join(map(str, missing[:SHOWN]))}{more} are missing (counted from 0)"
    for index, prefixes in sorted(holders.items()):
        if len(prefixes) > 1:
            yield f"{' and '.join(prefixes)} are both shard {index}; give the pairs of one run and key with --prefixes"
            return


def order_and_check_pairs(prefixes: Sequence[str]) -> list[tuple[str, DatasetSidecar | None]]:
    """Return (prefix, sidecar or None) of the pairs in the order to join them; `DataError` if they do not fit together."""
    known = {prefix: sidecar.read_sidecar(prefix) for prefix in prefixes}
    dtypes = {prefix: IndexedDataset(prefix).dtype for prefix in prefixes}
    problems = [
        *first_disagreement_text(dtypes, "holds ids of type", str),
        *_dataset_tokenizer_mismatches(known),
        *first_disagreement_text(
            {prefix: facts and facts.level for prefix, facts in known.items()}, "has sequences that are a", str
        ),
        *shard_problems({prefix: facts.shard if facts else None for prefix, facts in known.items()}),
    ]
    if problems:
        raise DataError("\n".join(["the pairs cannot be joined", *(f"  {line}" for line in problems)]))
    return sorted(((prefix, known[prefix]) for prefix in prefixes), key=lambda pair: _shard_index_of_sidecar(pair[1]))


def _dataset_tokenizer_mismatches(known: Mapping[str, DatasetSidecar | None]) -> Iterator[str]:
    """Yield a sentence if pairs were written with different tokenizers."""
    tokenizers = {prefix: facts.tokenizer if facts else None for prefix, facts in known.items()}
    hashes = {prefix: tokenizer and tokenizer["hash"] for prefix, tokenizer in tokenizers.items()}
    names = {tokenizer["hash"]: describe_tokenizer(tokenizer) for tokenizer in tokenizers.values() if tokenizer}
    yield from first_disagreement_text(hashes, "was written with", lambda key: names[str(key)])


def _shard_index_of_sidecar(facts: DatasetSidecar | None) -> int:
    return facts.shard[0] if facts and facts.shard else 0


def merge_dataset_pairs(prefixes: Sequence[str], output_prefix: str, multimodal: bool) -> str:
    """Join the pairs into one. Return a line that says what was joined."""
    if Path(output_prefix).resolve() in [Path(prefix).resolve() for prefix in prefixes]:
        raise DataError(f"--output-prefix {output_prefix} is one of the pairs to join; choose another name")
    pairs = order_and_check_pairs(prefixes)
    facts = [known for _, known in pairs]
    # What is not known of a part is not said of the whole.
    first = facts[0]
    tokenizer = first.tokenizer if first and all(known and known.tokenizer for known in facts) else None
    level: Literal["document", "sentence"] = next((known.level for known in facts if known), "document")
    with IndexedDatasetBuilder(
        output_prefix, IndexedDataset(prefixes[0]).dtype, tokenizer=tokenizer, level=level, multimodal=multimodal
    ) as builder:
        for prefix, _ in tqdm(pairs, unit="pair", disable=not sys.stderr.isatty()):
            builder.add_index(prefix)
    return (
        f"{len(prefixes)} pairs, {builder.num_documents} documents, {builder.num_tokens} tokens -> "
        f"{bin_path(output_prefix)}, {idx_path(output_prefix)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the pairs, and print what was done."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--input", type=Path, metavar="DIR", help="folder whose pairs are joined, in the order of their names"
    )
    given.add_argument("--prefixes", nargs="+", metavar="PREFIX", help="the pairs to join, in this order")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="the files are PREFIX.bin, PREFIX.idx and PREFIX.json"
    )
    parser.add_argument(
        "--multimodal", action="store_true", help="the pairs say of each sequence whether it is text or image"
    )
    args = parser.parse_args(arguments)
    try:
        print(
            merge_dataset_pairs(args.prefixes or find_pairs_in_folder(args.input), args.output_prefix, args.multimodal)
        )
    except (DataError, OSError) as error:
        sys.exit(f"merge_datasets.py: {error}")
