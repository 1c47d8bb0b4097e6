"""Train, check and try tokenizers.

    megatron tokenizer train --input corpus.jsonl --vocab-size 8000 --output-dir my-bpe
    megatron tokenizer check --tokenizer-type HuggingFaceTokenizer --tokenizer-model my-bpe --padded-vocab-size 8064
    megatron tokenizer encode --tokenizer-type HuggingFaceTokenizer --tokenizer-model my-bpe "Call me Ishmael."
    megatron tokenizer decode --tokenizer-type HuggingFaceTokenizer --tokenizer-model my-bpe 3410 416 13

train writes vocab.json, merges.txt and tokenizer.json of a byte-level BPE, or tokenizer.model of SentencePiece. check
ends with status 1 when something is wrong. Each command has --help.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from megatron.cli.tool_parser import ToolArgumentParser, add_input_format_options
from megatron.core.config.flags.declare import ConfigError, add_config_arguments, config_from_namespace
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.ingest.input_spans import InputPosition
from megatron.core.datasets.ingest.inputs import find_input_files, read_input_chunks, spans_of_corpus_shard
from megatron.core.datasets.ingest.records import parse_records
from megatron.core.datasets.storage import write_file
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.check import examine_tokenizer, measure_corpus_round_trips, promises_round_trips
from megatron.core.tokenizers.engines import num_usable_processors
from megatron.core.tokenizers.train import train_byte_level_bpe, train_sentencepiece
from megatron.training.launch.launch_info import install_interrupt_excepthook


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="learn a vocabulary from text",
        description="Learn a byte-level BPE or a SentencePiece model from text.",
    )
    _add_tokenizer_train_arguments(train)
    check = commands.add_parser(
        "check",
        help="look for what is wrong, or may surprise",
        description="Look for colliding special ids, ids that the model lacks, text that does not come "
        "back from its ids, and added tokens that text can hit.",
    )
    add_config_arguments(check, TokenizerConfig)
    group = check.add_argument_group("Check")
    group.add_argument("--padded-vocab-size", type=int, metavar="N", help="ids that the model has; more are wrong")
    group.add_argument("--strict", action="store_true", help="count notes as wrong, too")
    _add_input_arguments(check.add_argument_group("Corpus"), required=False)
    encode = commands.add_parser(
        "encode",
        help="text to ids, tokens and spans of bytes",
        description="Show the ids of a text, how the vocabulary writes them, and the bytes they stand for.",
    )
    encode.add_argument("text", nargs="*", metavar="TEXT", help="texts; none: standard input, as one text")
    add_config_arguments(encode, TokenizerConfig)
    group = encode.add_argument_group("Output")
    group.add_argument("--marked", action="store_true", help="names of special tokens in the text are those tokens")
    group.add_argument("--json", action="store_true", help="one JSON object a text: ids, tokens and spans")
    group.add_argument("--ids-only", action="store_true", help="one line of ids a text")
    decode = commands.add_parser("decode", help="ids to text", description="Write the text of some ids.")
    decode.add_argument(
        "ids", nargs="*", type=int, metavar="ID", help="ids; none: standard input, with white space between"
    )
    add_config_arguments(decode, TokenizerConfig)
    return parser.parse_args(arguments)


def _add_tokenizer_train_arguments(parser: argparse.ArgumentParser) -> None:
    _add_input_arguments(parser.add_argument_group("Input"), required=True)
    group = parser.add_argument_group("Vocabulary")
    group.add_argument(
        "--kind",
        choices=["byte-bpe", "bpe", "unigram"],
        default="byte-bpe",
        help="byte-bpe: GPT-2's kind; bpe, unigram: a SentencePiece model (default: byte-bpe)",
    )
    group.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="number of ids, special tokens included"
    )
    group.add_argument(
        "--special-tokens",
        nargs="*",
        metavar="NAME",
        help="names of special tokens; of byte-bpe they take the first ids, and the first ends documents "
        "(default: <|endoftext|>); of the others they follow <unk> <s> </s> <pad>",
    )
    group.add_argument(
        "--min-frequency",
        type=int,
        default=2,
        metavar="N",
        help="byte-bpe joins only pairs that occur so often (default: 2)",
    )
    group.add_argument(
        "--keep-whitespace",
        action="store_true",
        help="SentencePiece: text comes back as it was, instead of with NFKC and single spaces",
    )
    group.add_argument(
        "--max-lines",
        type=int,
        default=2_000_000,
        metavar="N",
        help="SentencePiece learns from a random choice of so many lines; 0: all (default: 2000000)",
    )
    group = parser.add_argument_group("Output")
    group.add_argument("--output-dir", required=True, type=Path, metavar="FOLDER", help="folder for the files")


def _add_input_arguments(group: argparse._ArgumentGroup, *, required: bool) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        required=required,
        metavar="FILE",
        help="files, folders or patterns with *: JSON lines or text (.txt), plain, .gz or .zst, .parquet or .arrow; - for standard input",
    )
    add_input_format_options(group)
    group.add_argument("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")


def read_texts(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the texts of all inputs in batches, the documents that preprocess_data.py finds there, with progress on standard
    error; unreadable records are counted there.
    """
    key = args.json_key
    spans = spans_of_corpus_shard(find_input_files(args.input, args.input_format, args.text_documents), None)
    dropped: dict[str, int] = {}
    documents = 0
    with tqdm(unit="B", unit_scale=True, disable=None, desc="read", file=sys.stderr) as progress:
        for chunk in read_input_chunks(spans, [key], InputPosition()):
            records = parse_records(chunk, [key])
            for reason, drop in records.drops.items():
                dropped[reason] = dropped.get(reason, 0) + drop.count
            documents += len(records.texts[0])
            progress.update(chunk.num_bytes)
            yield [text for (text,) in records.texts[0]]
    left_out = "".join(f"; {count} left out: {reason}" for reason, count in dropped.items())
    print(f"read {documents} texts{left_out}", file=sys.stderr)


def train_and_write_tokenizer(args: argparse.Namespace) -> int:
    """Train a tokenizer and write its files. Return the exit code."""
    texts = read_texts(args)
    if args.kind == "byte-bpe":
        if args.keep_whitespace:
            raise ConfigError("--keep-whitespace is for SentencePiece; a byte-level BPE always keeps it")
        names = ["<|endoftext|>"] if args.special_tokens is None else args.special_tokens
        files: dict[str, str | bytes] = dict(
            train_byte_level_bpe(
                texts, vocab_size=args.vocab_size, special_tokens=names, min_frequency=args.min_frequency
            )
        )
        use = f"HuggingFaceTokenizer --tokenizer-model {args.output_dir}"
        kind = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(args.output_dir))
    else:
        model = train_sentencepiece(
            texts,
            kind=args.kind,
            vocab_size=args.vocab_size,
            special_tokens=args.special_tokens or (),
            keep_whitespace=args.keep_whitespace,
            max_lines=args.max_lines,
            threads=num_usable_processors(),
        )
        files = {"tokenizer.model": model}
        use = f"GPTSentencePieceTokenizer --tokenizer-model {args.output_dir / 'tokenizer.model'}"
        kind = TokenizerConfig(
            tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(args.output_dir / "tokenizer.model")
        )
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_file(args.output_dir / name, content)
    size = build_tokenizer(kind).vocab_size
    print(f"wrote {', '.join(files)} to {args.output_dir}: {size} ids\nuse it with --tokenizer-type {use}")
    if size < args.vocab_size:
        print(f"the text gave no more than {size} of the {args.vocab_size} ids asked for")
    return 0


def print_tokenizer_findings(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Print what is wrong with a tokenizer. Return the exit code, 1 if anything is."""
    findings = examine_tokenizer(tokenizer, args.padded_vocab_size)
    if args.input:
        result = measure_corpus_round_trips(tokenizer, read_texts(args))
        print(
            f"corpus: {result.texts} texts, {result.num_bytes} bytes, {result.ids} ids, "
            f"{result.num_bytes / max(result.ids, 1):.2f} bytes an id, highest id {result.highest}"
        )
        if result.lost:
            (findings.wrong if promises_round_trips(tokenizer) else findings.notes).append(
                f"{result.lost} of {result.texts} texts of the corpus do not come back from their ids; the first: {result.first_loss}"
            )
    mark = tokenizer_fingerprint_fields(tokenizer)
    print(f"{mark['kind']}: {mark['vocab_size']} ids, end of document {mark['eod']}, hash {mark['hash']}")
    print(tokenizer.engine)
    for word, lines in (("wrong", findings.wrong), ("note", findings.notes)):
        for line in lines:
            print(f"{word}: {line}")
    if not findings.wrong:
        print("nothing is wrong")
    return 1 if findings.wrong or (args.strict and findings.notes) else 0


def print_encoded_texts(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Print the ids of texts, with their tokens and byte spans. Return the exit code."""
    for text in args.text or [sys.stdin.read()]:
        ids = (tokenizer.tokenize_with_special if args.marked else tokenizer.tokenize)(text)
        tokens = [tokenizer.id_to_token(token) for token in ids]
        spans = None if args.marked else tokenizer.token_byte_spans(text)
        if args.json:
            print(json.dumps({"ids": ids, "tokens": tokens, **({} if spans is None else {"spans": spans})}))
        elif args.ids_only:
            print(*ids)
        else:
            content = text.encode()
            for place, (token, name) in enumerate(zip(ids, tokens)):
                where = (
                    ""
                    if spans is None
                    else f"{spans[place][0]:>7} {spans[place][1]:>7}  {content[slice(*spans[place])]!r}"
                )
                print(f"{token:>8}  {ascii(name):<24} {where}".rstrip())
    return 0


def print_decoded_text(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Print the text of ids. Return the exit code."""
    ids = args.ids or [int(word) for word in sys.stdin.read().split()]
    unknown = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
    if unknown:
        raise ConfigError(f"{unknown[0]} is not an id of this tokenizer, which has {tokenizer.vocab_size}")
    print(tokenizer.detokenize(ids))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code: 1 if something is wrong, 2 if it cannot be done."""
    install_interrupt_excepthook()
    args = parse_arguments(arguments)
    try:
        if args.command == "train":
            return train_and_write_tokenizer(args)
        tokenizer = build_tokenizer(config_from_namespace(TokenizerConfig, args))
        return {"check": print_tokenizer_findings, "encode": print_encoded_texts, "decode": print_decoded_text}[
            args.command
        ](args, tokenizer)
    except (ConfigError, DataError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
