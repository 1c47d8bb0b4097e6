"""`--help`: one screen with the flags that most runs need; `--help all`, or groups and flags that match some words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron.cli.command_names import command_name, with_command_names

COMMON = tuple(
    """
    num_layers hidden_size num_attention_heads seq_length micro_batch_size global_batch_size train_iters lr
    lr_decay_style lr_warmup_fraction weight_decay bf16 data_path tokenizer_type save load save_interval
    tensor_model_parallel_size pipeline_model_parallel_size use_distributed_optimizer
    """.split()
)
MORE = (
    "--help all        every flag, in groups\n"
    "--help moe        groups and flags that speak of it; also several words: --help learning rate\n"
    "megatron check-config <flags> --world-size N        whether a run with these flags would start, before anything does"
)

Section = tuple[str, str | None, list[argparse.Action]]  # title, description, flags


class HelpAction(argparse.Action):
    """Argparse action of --help: prints the help that its words ask for, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(
            option_strings,
            argparse.SUPPRESS,
            nargs="*",
            default=argparse.SUPPRESS,
            metavar="WORD",
            help="the flags that most runs need; with words, what matches them; with `all`, every flag",
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print, and exit with 0; with 1 where nothing matches."""
        words = [word.lower() for word in values]
        if words == ["all"]:
            text = parser.format_help()
        else:
            text = search_help(parser, words) if words else common_flags_help(parser)
        message = text or f"nothing speaks of {' '.join(values)}\n\n{MORE}\n"
        sys.stdout.write(with_command_names(message, command_name()))
        parser.exit(0 if text else 1)


def help_groups(parser: argparse.ArgumentParser) -> Iterator[Section]:
    """Yield the parser's groups (title, description, actions) with their flags that are not hidden."""
    for group in parser._action_groups:
        actions = [
            action for action in group._group_actions if action.help is not argparse.SUPPRESS and action.option_strings
        ]
        if actions and group.title:
            yield group.title, group.description, actions


def common_flags_help(parser: argparse.ArgumentParser) -> str:
    """Return the text of a plain --help: usage, the flags that most runs need, the groups, and how to see the rest."""
    every = list(help_groups(parser))
    common = {action.dest: action for _, _, actions in every for action in actions if action.dest in COMMON}
    titles = ", ".join(f"{title} ({len(actions)})" for title, _, actions in every)
    number = sum(len(actions) for _, _, actions in every)
    formatted = _format_help_sections(
        parser, [("The flags that most runs need", None, [common[name] for name in COMMON if name in common])]
    )
    listed = parser._get_formatter()
    listed.add_text(f"All {number} flags stand in {len(every)} groups: {titles}.")
    return f"usage: {parser.prog} [flags]\n\n{parser.description}\n\n{formatted}\n{listed.format_help()}\n{MORE}\n"


def search_help(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Return help on the groups whose title has all these words and, of other groups, on the flags whose spelling or
    help has them; empty if nothing matches. A word of up to three letters (rl, moe, tp) must begin a word there.
    """

    def text_has_word(word: str, text: str) -> bool:
        return f" {word}" in f" {text}" if len(word) < 4 else word in text

    def text_has_all_words(text: str) -> bool:
        plain = text.lower().replace("-", " ").replace("(", " ")
        return all(text_has_word(word, plain) or "-" in word and word in text.lower() for word in words)

    matches: list[Section] = []
    for title, description, actions in help_groups(parser):
        chosen = actions
        if not text_has_all_words(title):
            chosen = [one for one in actions if text_has_all_words(f"{' '.join(one.option_strings)} {one.help}")]
        if chosen:
            matches.append((title, description if chosen is actions else None, chosen))
    return _format_help_sections(parser, matches) if matches else ""


def _format_help_sections(parser: argparse.ArgumentParser, sections: Iterable[Section]) -> str:
    formatter = parser._get_formatter()
    for title, description, actions in sections:
        formatter.start_section(title)
        formatter.add_text(description)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()
