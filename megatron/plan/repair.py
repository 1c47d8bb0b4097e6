"""For each broken rule, changes of one flag that would keep it.

What a rule says names the flags that it speaks of and the numbers that matter. So the values to try come from the rules
themselves: of a size its neighbours, divisors and multiples of those numbers; of a choice the other choices; of a switch
the other state; of anything what it is when left out. Each is tried alone, the nearest first, and of each flag the first
that keeps the rule and breaks no other is an answer:

    --ffn-hidden-size 100 cannot be divided over --tensor-model-parallel-size 8
        --ffn-hidden-size 100 -> 104, or --tensor-model-parallel-size 8 -> 4

Several rules may need several changes: which of the answers go together, the user decides.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

from megatron.core.config.flags.declare import flag_fields, flag_name, flag_spellings
from megatron.core.config.plan.pattern import suggested_hybrid_patterns
from megatron.core.config.settings.run import RequestedRun
from megatron.plan.setup import WORLD, BrokenRule, RunSetup

# Switches that make another run of it. Nobody wants them on only because a rule would be kept.
PURPOSES = ("skip_train", "mock_data", "sft", "fim_data", "use_checkpoint_args", "finetune")
# Rules that are asked about when all others are kept: what keeps one of those may bring them up, and has not broken them.
LATER = frozenset({"trained-parameters", "batch-over-time", "learning-rate-over-time", "files", "machine"})
LARGEST, MOST_VALUES = 10**7, 24


@dataclass(frozen=True, slots=True)
class FlagEdit:
    """A change of one flag. after: None: left out."""

    name: str
    before: Any
    after: Any

    @property
    def flag(self) -> str:
        """The flag as it is written."""
        return "--world-size" if self.name == WORLD else flag_name(self.name)

    def __str__(self) -> str:
        flag = "ranks" if self.name == WORLD else self.flag
        if isinstance(self.after, bool):
            _, default, off = _flags()[self.name]
            return (
                f"add {off}" if default is True and not self.after else f"{'add' if self.after else 'leave out'} {flag}"
            )
        if self.after in (None, ()):
            return f"leave out {flag} {format_flag_value(self.before)}"
        if self.before in (None, ()):
            return f"add {flag} {format_flag_value(self.after)}"
        return f"{flag} {format_flag_value(self.before)} -> {format_flag_value(self.after)}"


def mending_edits(setting: RunSetup, one: BrokenRule, *, fixed: Collection[str] = ()) -> list[FlagEdit]:
    """Return edits, at most one of each flag, which alone keep this rule and break no other; flags in the order of its message.
    fixed: flags that stay as they are.
    """
    # Tokenizer and machine are looked at only for rules of theirs.
    flags_alone = replace(setting, whole=False)
    setting = flags_alone if one in flags_alone.find_broken_rules() else setting
    before = Counter(other.rule for other in setting.find_broken_rules())

    def mends(edit: FlagEdit) -> bool:
        after = Counter(other.rule for other in setting.with_values({edit.name: edit.after}).find_broken_rules())
        return after[one.rule] < before[one.rule] and (after - before).keys() <= LATER

    names = [name for name in flags_named_by_rule(one, setting) if name not in fixed]
    edits = (next(filter(mends, candidate_edits(setting, one, name)), None) for name in names)
    return [edit for edit in edits if edit is not None]


def flags_named_by_rule(one: BrokenRule, setting: RunSetup) -> list[str]:
    """Return the fields that a broken rule's message names; for groups that are not used, the heads."""
    names = [WORLD] if re.match(r"\d+ ranks are not", one.says) else []
    text = re.sub(r"(--[a-z-]*?)(\w+)/(\w+)(-[a-z-]+)", r"\1\2\4 \1\3\4", one.says)
    fields = _field_by_flag_spelling()
    for word in re.findall(r"--[a-z0-9][a-z0-9_-]*", text):
        # "--lr-warmup-..." are all flags that begin so.
        begins = [spelling for spelling in fields if word.endswith("-") and spelling.startswith(word)]
        names += [fields[spelling] for spelling in (word, *begins) if spelling in fields]
    if not setting.config.model.group_query_attention:
        # Each head is a group of its own then, whatever the flag says.
        names = ["num_attention_heads" if name == "num_query_groups" else name for name in names]
    return list(dict.fromkeys(names))


def candidate_edits(setting: RunSetup, one: BrokenRule, name: str) -> list[FlagEdit]:
    """Return the edits of one flag that may mend a broken rule, the nearest first."""
    before = setting.value(name)
    numbers = {float(text) for text in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.])", one.says)}
    for other in flags_named_by_rule(one, setting):
        value = setting.value(other)
        numbers |= {float(value)} if _is_finite(value) and not isinstance(value, bool) else set()
    kind, default, _ = _flags()[name]
    values = [*_candidate_values(kind, before, numbers), default]
    if name == "hybrid_layer_pattern" and before:
        values += suggested_hybrid_patterns(before, setting.config.parallel.pp)
    unlike = [value for value in dict.fromkeys(values) if value != before and not (name in PURPOSES and value is True)]
    if setting.origins.get(name) == "script":
        # A default of the script is there whatever the command line leaves out.
        unlike = [value for value in unlike if value not in (None, ())]
    unlike.sort(key=lambda value: _distance(before, value, one.says))
    return [FlagEdit(name, before, value) for value in unlike[:MOST_VALUES]]


def _distance(before: Any, after: Any, says: str) -> float:
    """Return how far a value is from another: the ratio of sizes; what a rule names is nearer, leaving out is farther."""
    if _is_finite(before) and _is_finite(after) and before > 0 and after > 0:
        return abs(math.log2(after / before))
    if after in (None, ()):
        return 2.0
    named = set(after) <= set(before or ()) if isinstance(after, tuple) else str(after) in re.findall(r"[\w+-]+", says)
    return 0.75 if named else 1.0


def _is_finite(value: Any) -> bool:
    """Whether a value is a number, and neither inf nor nan, which flags can be given."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def format_flag_value(value: Any) -> str:
    """Format a value as on a command line."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _candidate_values(kind: Any, before: Any, numbers: set[float]) -> list[Any]:
    """Return values of a flag of this type that the numbers in a rule's message suggest."""
    base = (
        next((part for part in get_args(kind) if part is not type(None)), kind)
        if type(None) in get_args(kind)
        else kind
    )
    if base is bool:
        return [not before]
    if get_origin(base) is Literal:
        return list(get_args(base))
    if get_origin(base) is tuple:
        return _candidate_tuples(get_args(base)[0], before or (), numbers)
    if base is int:
        return _candidate_integers(
            before, {int(number) for number in numbers if number == int(number) and 0 < number <= LARGEST}
        )
    return sorted(numbers) if base is float else []


def _candidate_integers(before: int | None, numbers: set[int]) -> list[int]:
    """Return integers to try: a rule's numbers and their neighbours, small divisors, and multiples near what was given."""
    sizes = set(numbers) | {number + step for number in numbers for step in (-1, 1)}
    products = numbers | {a * b for a in numbers for b in numbers if a < b}
    for number in numbers:
        sizes |= {part for part in range(1, min(number, 128) + 1) if number % part == 0}
        sizes |= {number // part for part in range(1, 9) if number % part == 0}
    if before is not None:
        sizes |= {max(1, abs(before) // number + step) * number for number in products for step in (0, 1)}
    return sorted(size for size in sizes if 0 < size <= LARGEST)


def _candidate_tuples(kind: Any, before: tuple[Any, ...], numbers: set[float]) -> list[tuple[Any, ...]]:
    """Return values to try for a flag of several words: fewer, longer, without repetition, factors of a number."""
    choices = [before[:1], tuple(dict.fromkeys(before))]
    choices += [(word,) for word in get_args(kind)] if get_origin(kind) is Literal else []
    lengths = sorted(int(number) for number in numbers if 1 <= number <= 512 and number == int(number))
    choices += [(before * length)[:length] for length in lengths]
    if kind is int:
        choices += [(part, length // part) for length in lengths for part in range(2, length) if length % part == 0]
        choices += [(length - 2 * (length // 3), length // 3, length // 3) for length in lengths]
    if kind is float:
        choices.append((0.0,) * len(before))
    return [row for row in choices if row]


@cache
def _flags() -> dict[str, tuple[Any, Any, str]]:
    """Return field -> (type, default, spelling that turns off a switch), with an entry `WORLD` for the number of ranks."""
    flags = {
        one.name: (kind, one.default, one.metadata["off"] or "--no-" + flag_name(one.name)[2:])
        for one, kind in flag_fields(RequestedRun)
    }
    return {WORLD: (int, 1, ""), **flags}


@cache
def _field_by_flag_spelling() -> dict[str, str]:
    """Return spelling of a flag -> its field."""
    return {word: one.name for one, kind in flag_fields(RequestedRun) for word in flag_spellings(one, kind)}
