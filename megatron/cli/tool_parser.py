"""The parser of every tool, with one line of usage and errors that end with where to look; and the options that several tools share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from megatron.core.config.flags.declare import accept_values_with_dashes
from megatron.core.tokenizers.generation_config import GenerationDefaults

_USUAL_NUM_TOKENS = 64  # that tools add to a prompt
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@contextmanager
def exit_on(*errors: type[Exception], code: int = 1) -> Iterator[None]:
    """Within: an error of these classes is told on standard error, and the process exits with `code`."""
    try:
        yield
    except errors as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(code) from None


class ToolArgumentParser(argparse.ArgumentParser):
    """argparse.ArgumentParser with a one-line usage: required arguments and "[options]". Unless its options say another
    thing, it prints the description as it stands and takes no abbreviated flags.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})

    def parse_known_args(self, *arguments: Any, **keywords: Any) -> Any:
        """Parse as argparse does; values may begin with a dash."""
        accept_values_with_dashes(self)
        return super().parse_known_args(*arguments, **keywords)

    def format_usage(self) -> str:
        """Return the usage line, with a newline."""
        self.usage = self._one_line_usage()
        return super().format_usage()

    def format_help(self) -> str:
        """Return usage, description and groups of options."""
        self.usage = self._one_line_usage()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print usage, the error and a hint to --help, and exit with 2."""
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n--help says what each option takes\n")

    def _one_line_usage(self) -> str:
        words = []
        for action in self._actions:
            name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            if not action.option_strings:
                words.append(name if action.nargs not in ("*", "?") else f"[{name}]")
            elif action.required:
                words.append(f"{action.option_strings[0]} {name}")
        return " ".join([self.prog, *words, "[options]"]).replace("%", "%%")


def add_checkpoint_options(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Add --load and --ckpt-step in a new group; return the group."""
    group = parser.add_argument_group(title)
    group.add_argument(
        "--load", required=True, metavar="FOLDER", help="a run's --save, a Hugging Face folder, or one of Megatron's"
    )
    group.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load, instead of the newest")
    return group


def add_ckpt_step(group: argparse._ActionsContainer, verb: str = "read") -> None:
    """Add --ckpt-step, of a folder of checkpoints. verb: what is done with the iteration."""
    text = f"iteration to {verb}, where the folder has several (default: the newest)"
    group.add_argument("--ckpt-step", type=int, metavar="N", help=text)


def add_dtype(group: argparse._ArgumentGroup) -> None:
    """Add --dtype, of the weights of a loaded network."""
    group.add_argument(
        "--dtype",
        choices=("auto", *_DTYPES),
        default="auto",
        help="format of the weights (default: as they were saved)",
    )


def add_parallel_size_options(group: argparse._ArgumentGroup, names: Sequence[str]) -> None:
    """Add options for parallel sizes, by their names in `ParallelConfig`."""
    for name in names:
        group.add_argument("--" + name.replace("_", "-"), type=int, default=1, metavar="N", help="ranks (default: 1)")


def add_sampling_options(group: argparse._ArgumentGroup, seed: str) -> None:
    """Add how many tokens are generated, and how they are drawn. seed: the help of --seed."""
    group.add_argument("--num-tokens", type=int, metavar="N", help=f"most tokens to add (default: {_USUAL_NUM_TOKENS})")
    group.set_defaults(stop_words=(), most_tokens=None)
    group.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest (default: 1)")
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest only (default: 0, all)")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest that reach P (default: 0, all)"
    )
    group.add_argument("--seed", type=int, default=1234, help=f"{seed} (default: 1234)")
    add_generation_config_option(group)


def add_input_format_options(group: argparse._ArgumentGroup) -> None:
    """Add how files of text are read."""
    group.add_argument(
        "--input-format",
        choices=["auto", "jsonl", "txt", "parquet", "arrow"],
        default="auto",
        help="format of all inputs; auto: by their endings, JSON lines where the ending says nothing",
    )
    group.add_argument(
        "--text-documents",
        choices=["file", "line"],
        default="file",
        help="what a document of a plain text file is: the whole file, or each line (default: file)",
    )


def add_generation_config_option(group: argparse._ArgumentGroup) -> None:
    """Add --generation-config: what is taken from the file of that name."""
    group.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: what is not said is as generation_config.json of the folder says; none: only the ids that end a text "
        "are read there (default: auto)",
    )


def fill_sampling_defaults(given: argparse.Namespace, generation: GenerationDefaults) -> None:
    """Set the options of sampling that were not given to what a network's folder says, if anything."""
    for name, value in generation.sampling.items():
        if getattr(given, name, None) is None:
            setattr(given, name, value)
    given.stop_words, given.most_tokens = generation.stop_words, generation.num_tokens


def num_tokens_or_default(given: argparse.Namespace, requested: int | None, free: int) -> int:
    """Return how many tokens to add: as requested, else as the command line says, else as the network's folder says, else a default.
    free: tokens behind the prompt, which a folder's number is cut to.
    """
    if requested is None:
        requested = given.num_tokens
    if requested is not None:
        return int(requested)
    return _USUAL_NUM_TOKENS if given.most_tokens is None else max(1, min(given.most_tokens, free))


def add_tokenizer_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add a group of tokenizer settings, by their names in `TokenizerConfig`."""
    group = parser.add_argument_group(
        "tokenizer", "Other files than the run was given; with a type, instead of all its settings."
    )
    for name in names:
        metavar = "TYPE" if name == "tokenizer_type" else "FILE"
        group.add_argument("--" + name.replace("_", "-"), metavar=metavar)


def add_world_size_and_entry_options(parser: argparse.ArgumentParser, entries: Iterable[str]) -> None:
    """Add --world-size and --entry, of a run whose flags follow. entries: the entry scripts."""
    parser.add_argument("--world-size", type=int, help="ranks that will run (default: what torchrun's words say, or 1)")
    parser.add_argument(
        "--entry", choices=entries, default="pretrain_gpt.py", help="script of the flags, if no command names one"
    )


def parse_options_and_run_words(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, without: str = ""
) -> tuple[argparse.Namespace, list[str]]:
    """Return (the tool's own options, the words of the run). without: the option that needs no run."""
    place = list(argv).index("--") if "--" in argv else len(argv)
    options, words = parser.parse_known_args(list(argv[:place]))
    if words and place < len(argv):
        parser.error(f"{' '.join(words)} is no option of this command; flags of the run come after --")
    words += argv[place + 1 :]
    if not words and not (without and getattr(options, without) is not None):
        parser.error("give the flags of a run")
    return options, words
