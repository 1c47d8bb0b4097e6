"""Check the flags of a run before it starts: which rules they break, and what would keep each.

    megatron check-config <the flags of the run> --world-size 8
    megatron check-config -- torchrun --nproc_per_node 8 pretrain_gpt.py <flags>     a whole command
    LAUNCH="python -m megatron check-config --" bash examples/gpt3/train_gpt3_175b_distributed.sh ...     what a launcher would start

It asks what the run asks of itself before it starts, and answers with the run's exit code: 0 it starts, 2 it does not. 1: what --build
has built does not agree. docs/rules.md lists the rules.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.cli.tool_parser import (
    ToolArgumentParser,
    add_world_size_and_entry_options,
    exit_on,
    parse_options_and_run_words,
)
from megatron.core.datasets.storage import write_file
from megatron.core.tokenizers.build import expected_vocab_size
from megatron.plan.analytic_estimate import with_padded_vocabulary
from megatron.plan.command import ENTRIES, ParsedTrainingCommand, parse_training_command
from megatron.plan.hardware import PROFILES, hardware_of
from megatron.plan.repair import FlagEdit, mending_edits
from megatron.plan.setup import WORLD, BrokenRule, RunSetup
from megatron.verify.rule_page import rules_page_markdown


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line: (the tool's own options, the words of the run)."""
    parser = ToolArgumentParser(description=__doc__)
    add_world_size_and_entry_options(parser, ENTRIES)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="the run will be on another machine, with this device: files need not be here (default: it is on this one)",
    )
    parser.add_argument(
        "--gpu",
        choices=PROFILES,
        help="kind of machine that will run it: what cannot fit its memory, by formulas, breaks a rule (megatron plan looks closer)",
    )
    parser.add_argument(
        "--why-not",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="what this change would break, and which other changes would keep that; may be given more than once",
    )
    parser.add_argument(
        "--build", action="store_true", help="build every rank's place without memory, and count what is there"
    )
    parser.add_argument(
        "--true-vocab-size",
        type=int,
        help="--build, --gpu: ids of the tokenizer (default: as its files say, where they are at hand, else GPT-2's 50257)",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--write-rules", type=Path, metavar="FILE", help="write the page of all rules, and stop")
    return parse_options_and_run_words(parser, argv, without="write_rules")


def apply_flag_changes(
    words: Sequence[str], wishes: Sequence[str], options: argparse.Namespace
) -> tuple[ParsedTrainingCommand, list[str]]:
    """Return the command with these changes, `flag=value` or a switch each, and the fields that they set."""
    ranks, more, fixed = options.world_size, [], []
    for wish in wishes:
        name, glued, value = wish.removeprefix("--").partition("=")
        fixed.append(name.replace("-", "_"))
        if fixed[-1] == WORLD:
            ranks = int(value) if value.isdecimal() else ranks
        else:
            more += [f"--{name}", *(value.split() if glued else ())]
            fixed[-1] = fixed[-1].removeprefix("no_") if not glued else fixed[-1]
    return enable_startup_checks(
        parse_training_command([*words, *more], ranks=ranks, entry=options.entry), options
    ), fixed


def enable_startup_checks(command: ParsedTrainingCommand, options: argparse.Namespace) -> ParsedTrainingCommand:
    """Return the command with all checks enabled that a run makes before it starts."""
    if command.setting is None:
        return command
    return replace(
        command, setting=replace(command.setting, whole=True, device=options.device or "", files=options.device is None)
    )


def memory_violations(command: ParsedTrainingCommand, options: argparse.Namespace) -> tuple[BrokenRule, ...]:
    """Return a broken rule "memory" if the run cannot fit the memory of the machine of --gpu."""
    if options.gpu is None or command.setting is None:
        return ()
    setting, config = command.setting.resolve_elastic_layout()
    config = with_padded_vocabulary(config, options.true_vocab_size or expected_vocab_size(config.tokenizer)[0])
    trouble = command.memory(config, setting.world_size, hardware_of(options.gpu).usable_bytes())
    return (BrokenRule("memory", trouble),) if trouble else ()


def flag_notes_of_command(command: ParsedTrainingCommand) -> list[str]:
    """Return notes on what is accepted although it changes nothing, and what could not be checked."""
    return list(
        dict.fromkeys([*command.messages, *(command.setting.run_preflight_checks().notes if command.setting else ())])
    )


def broken_rule_lines(
    broken: Sequence[BrokenRule], before: Sequence[BrokenRule], edits: Mapping[BrokenRule, Sequence[FlagEdit]]
) -> list[str]:
    """Return lines with the broken rules, their messages, and what would keep each. before: what was broken without the
    change asked about; edits: changes of one flag that alone keep a rule.
    """
    lines: list[str] = []
    for rule in dict.fromkeys(one.rule for one in broken):
        lines += ["", f"  {rule}"]
        for one in (one for one in broken if one.rule == rule):
            lines.append(f"    {one.says}" + ("  (broken without it, too)" if one in before else ""))
            if one in edits:
                tries = ", or ".join(map(str, edits[one]))
                lines.append(f"      {'try ' + tries if tries else 'no change of one flag is known to keep it'}")
    return lines


@dataclass(frozen=True, slots=True)
class ConfigCheckReport:
    """What is found about a command. before: rules that are broken without `why_not`. edits: of broken rules that flags
    can keep, changes of one flag that do. built: result of --build.
    """

    command: ParsedTrainingCommand
    broken: Sequence[BrokenRule]
    before: Sequence[BrokenRule]
    why_not: Sequence[str]
    edits: Mapping[BrokenRule, Sequence[FlagEdit]]
    built: dict[str, Any] | None
    ranks: int

    def report_values(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        return {
            "ranks": self.ranks,
            "kept": not self.broken,
            "broken": [asdict(one) | {"edits": self._edit_values(one)} for one in self.broken],
            "built": self.built,
            "notes": flag_notes_of_command(self.command),
            "why_not": self.why_not,
        }

    def report_lines(self) -> list[str]:
        """Return the report as lines of text."""
        count, wish = (
            len({one.rule for one in self.broken}),
            f"With {', '.join(self.why_not)}: " if self.why_not else "",
        )
        what = f"{count} rule{'s are' if count != 1 else ' is'} broken" if self.broken else "all rules are kept"
        lines = [
            f"{wish}{what} on {self.ranks} rank{'s' * (self.ranks > 1)}",
            *broken_rule_lines(self.broken, self.before, self.edits),
        ]
        if not self.broken:
            lines += [f"note: {line}" for line in flag_notes_of_command(self.command)]
        return [*lines, *(_layout_build_lines(self.built) if self.built else ())]

    def _edit_values(self, one: BrokenRule) -> list[dict[str, Any]]:
        return [asdict(edit) | {"flag": edit.flag, "text": str(edit)} for edit in self.edits.get(one, ())]


def _layout_build_lines(built: dict[str, Any]) -> list[str]:
    if built["problems"]:
        return ["what was built does not agree:", *(f"    {line}" for line in built["problems"])]
    counts = f"{built['layers']} layers and {built['parameters']:,} parameters"
    return [f"built {built['ranks']} places: {counts}, as the formulas say"]


def build_layout_for_report(setting: RunSetup, true_vocab_size: int | None) -> dict[str, Any]:
    """Build the layout's stages on the meta device and return what `--build` reports, as plain values."""
    from megatron.plan.simulate.layout_build_check import (
        check_layout_parameters,
    )  # needs torch, which no other answer waits for

    setting, config = setting.resolve_elastic_layout()
    return asdict(
        check_layout_parameters(
            config, setting.world_size, true_vocab_size=true_vocab_size or expected_vocab_size(config.tokenizer)[0]
        )
    )


def main(argv: list[str] | None = None) -> None:
    """Print the report, and exit with its code."""
    options, words = parse_arguments(sys.argv[1:] if argv is None else argv)
    if options.write_rules is not None:
        with exit_on(OSError):
            write_file(options.write_rules, rules_page_markdown())
        return
    report = _make_config_check_report(options, words)
    text = json.dumps(report.report_values(), indent=2) if options.json else "\n".join(report.report_lines())
    sys.stdout.write(text + "\n")
    raise SystemExit(2 if report.broken else 1 if report.built and report.built["problems"] else 0)


def _make_config_check_report(options: argparse.Namespace, words: Sequence[str]) -> ConfigCheckReport:
    """Check a command, look for edits that keep each broken rule and, with --build, build the network."""
    first = enable_startup_checks(parse_training_command(words, ranks=options.world_size, entry=options.entry), options)
    command, fixed = apply_flag_changes(words, options.why_not, options)
    before = first.broken_rules if options.why_not else ()
    rules = command.setting.find_broken_rules() if command.setting else ()
    broken = (*command.unread, *rules)
    broken = broken or memory_violations(command, options)
    edits: dict[BrokenRule, list[FlagEdit]] = {}
    if command.setting is not None:
        setting = replace(command.setting, files=False)
        # No flag brings a file.
        edits = {one: mending_edits(setting, one, fixed=fixed) for one in rules if one.rule != "files"}
    built = None
    if options.build and command.setting and not broken:
        built = build_layout_for_report(command.setting, options.true_vocab_size)
    ranks = command.setting.world_size if command.setting else options.world_size or 1
    return ConfigCheckReport(command, broken, before, options.why_not, edits, built, ranks)
