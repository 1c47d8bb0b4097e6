"""The fewest changes of flags that make a configuration keep every rule.

What a rule says names the flags that it speaks of and the numbers that matter. So the values to try come from the rules
themselves: of a size its neighbours, divisors and multiples of those numbers; of a choice the other choices; of a switch
the other state; of anything what it is when left out. The search adds one change at a time, always for a rule that is
still broken, first with one change in all, then with two, and so on:

    heads 30, tp 4, batch 100 on 8 ranks        broken: heads-over-tensor, global-batch
      one change    cannot do: no flag is named by both
      two changes   tp 4 -> 2 and batch 100 -> 96 keep every rule; heads 30 -> 32 and batch 100 -> 96 do so too

Among sets of equal size the nearest wins: a size counts its ratio, and a change of the network more than one of the layout.
The answer is the smallest among the values that were tried, not among all that exist; a limit of configurations can end it
early.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args, get_origin

from megatron.core.config.flags.declare import flag_fields, flag_name, flag_spellings
from megatron.core.config.plan.pattern import suggested_hybrid_patterns
from megatron.core.config.settings.data import DataConfig, FIMConfig, MaskingConfig, SFTDataConfig, TokenizerConfig
from megatron.core.config.settings.model import MLAConfig, ModelConfig, MTPConfig, PositionConfig
from megatron.core.config.settings.moe import MoEConfig
from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.core.config.settings.run import RequestedRun, TrainConfig
from megatron.plan.setup import WORLD, BrokenRule, RunSetup, places_of_settings

# Values for what nobody but the user can know; the report says that they are examples.
EXAMPLES: Mapping[str, Any] = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 1024,
    "micro_batch_size": 1,
    "train_iters": 1000,
    "train_samples": 100_000,
    "lr": 3e-4,
    "save_interval": 1000,
    "save": "FOLDER",
    "load": "FOLDER",
    "pretrained_checkpoint": "FOLDER",
    "export_hf": "FOLDER",
    "num_experts": 8,
    "mtp_num_layers": 1,
    "recompute_num_layers": 1,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_expert_capacity_factor": 1.0,
    "kv_channels": 64,
    "window_size": "127,0",
    "data_path": ("PREFIX",),
    "fim_split_sample": "TOKEN",
    "vocab_file": "FILE",
    "merge_file": "FILE",
    "tokenizer_model": "FILE",
    "vocab_size": 50257,
}
# Flags that a rule means without naming them: what the number of data-parallel ranks follows from, and others.
_RANKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", WORLD)
MEANT: Mapping[str, tuple[str, ...]] = {
    "global-batch": _RANKS,
    "rotations": ("position_embedding_type",),
    "context": ("tensor_model_parallel_size",),
    "hybrid-context": ("seq_length", *_RANKS),
    "batch-over-time": (
        *_RANKS,
        "global_batch_size",
        "micro_batch_size",
        "rampup_batch_size",
        "step_batch_size_schedule",
        "decrease_batch_size_if_needed",
    ),
    "learning-rate-over-time": (
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_fraction",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
    ),
}
# Where sizes come from that are not given.
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "num_query_groups": ("num_attention_heads",),
    "ffn_hidden_size": ("hidden_size",),
    "kv_channels": ("hidden_size", "num_attention_heads"),
    "moe_ffn_hidden_size": ("ffn_hidden_size", "hidden_size"),
    "max_position_embeddings": ("seq_length",),
    "global_batch_size": ("micro_batch_size",),
    "decoder_seq_length": ("seq_length",),
    "decoder_num_layers": ("encoder_num_layers",),
}
# How much a change counts beside its distance: one of the layout 1, one of the network most.
WEIGHTS: Mapping[type, float] = {
    ModelConfig: 4,
    PositionConfig: 4,
    MLAConfig: 4,
    MTPConfig: 4,
    MoEConfig: 4,
    DataConfig: 3,
    FIMConfig: 3,
    SFTDataConfig: 3,
    MaskingConfig: 3,
    TokenizerConfig: 3,
    PrecisionConfig: 3,
    OptimizerConfig: 2,
    ScheduleConfig: 2,
    TrainConfig: 2,
}
WEIGHT_OF: Mapping[str, float] = {
    "num_layers": 10,
    "encoder_num_layers": 10,
    "hidden_size": 10,
    "num_attention_heads": 10,
    "hybrid_layer_pattern": 12,
    "seq_length": 6,
    "max_position_embeddings": 2,
    "padded_vocab_size": 2,
    "attention_backend": 1,
    "micro_batch_size": 1.5,
    WORLD: 4,
}
# Switches that make another run of it. Nobody wants them on only because a rule would be kept.
PURPOSES = ("skip_train", "mock_data", "sft", "fim_data", "use_checkpoint_args", "finetune")
LARGEST, MOST_VALUES = 10**7, 24


@dataclass(frozen=True, slots=True)
class FlagEdit:
    """A change of one flag. after: None: left out. example: the value stands for one that only the user knows.
    mends: rules that are broken again without this change. far: distance from what was given.
    """

    name: str
    before: Any
    after: Any
    example: bool = False
    far: float = 0.0
    mends: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag as it is written."""
        return flag_name(self.name)

    def __str__(self) -> str:
        flag = "ranks" if self.name == WORLD else self.flag
        if isinstance(self.after, bool):
            kept_off = self.after is False and _flag_declarations_by_field()[self.name].default is True
            return (
                f"add {_flag_declarations_by_field()[self.name].off}"
                if kept_off
                else f"{'add' if self.after else 'leave out'} {flag}"
            )
        if self.after is None or self.after == ():
            return f"leave out {flag} {format_flag_value(self.before)}"
        change = (
            f"add {flag} {format_flag_value(self.after)}"
            if self.before in (None, ())
            else f"{flag} {format_flag_value(self.before)} -> {format_flag_value(self.after)}"
        )
        return change + ("  (for example)" if self.example else "")


@dataclass(frozen=True, slots=True)
class RepairResult:
    """Edits that keep every rule, or None. fewest: no smaller set of the values tried does. tried: configurations."""

    edits: tuple[FlagEdit, ...] | None
    fewest: bool
    tried: int


def smallest_repair(
    setting: RunSetup, *, fixed: Iterable[str] = (), most: int = 8, tries: int = 10_000
) -> RepairResult:
    """Find the smallest and nearest set of flag edits that keeps every rule, without changing the flags that are
    `fixed`. most: edits in one set. tries: configurations that are tried, after which the best so far is returned.
    """
    search = _RepairSearch(setting, frozenset(fixed), tries)
    start = search.broken_rules_after({})
    for count in range(search.min_further_edits(start, {}), most + 1):
        search.search_further_edits({}, start, count, 0.0)
        if search.best is not None or search.late:
            break
    if search.best is None:
        return RepairResult(None, False, len(search.seen))
    return RepairResult(_drop_needless_edits(setting, search.best), not search.late, len(search.seen))


@dataclass(slots=True)
class _RepairSearch:
    """Search through sets of edits by rising size. best: the nearest that was found, of `cost`. late: the limit of
    tries is reached. seen: set of edits -> rules that it breaks.
    """

    setting: RunSetup
    fixed: frozenset[str]
    tries: int
    best: dict[str, FlagEdit] | None = None
    cost: float = math.inf
    late: bool = False
    seen: dict[frozenset[tuple[str, str]], tuple[BrokenRule, ...]] = field(default_factory=dict)

    def broken_rules_after(self, done: Mapping[str, FlagEdit]) -> tuple[BrokenRule, ...]:
        """Return the rules that are broken after these edits (cached)."""
        key = frozenset((name, repr(edit.after)) for name, edit in done.items())
        if key not in self.seen:
            self.seen[key] = self._setup_after(done).find_broken_rules()
        return self.seen[key]

    def min_further_edits(self, broken: tuple[BrokenRule, ...], done: Mapping[str, FlagEdit]) -> int:
        """Return a lower bound of further edits needed to keep these rules: how many of them share no flag."""
        taken: set[str] = set()
        count = 0
        for names in sorted(
            ([name for name in self._editable_flags(one) if name not in done] for one in broken), key=len
        ):
            if not taken & set(names):
                taken, count = taken | set(names), count + 1
        return count

    def search_further_edits(
        self, done: Mapping[str, FlagEdit], broken: tuple[BrokenRule, ...], left: int, cost: float
    ) -> None:
        """Try all sets of up to `left` more edits than `done`, updating `best`. broken: after `done`; cost: its."""
        if not broken:
            self.best, self.cost = dict(done), cost
            return
        self.late = self.late or len(self.seen) > self.tries
        if self.late or self.min_further_edits(broken, done) > left:
            return
        setting = self._setup_after(done)
        # The rule that leaves the least choice.
        one = min(broken, key=lambda one: len(set(self._editable_flags(one)) - done.keys()))
        edits = [
            edit
            for name in self._editable_flags(one)
            if name not in done
            for edit in candidate_edits(setting, one, name)
        ]
        for edit in sorted(edits, key=lambda edit: edit.far):
            if cost + edit.far >= self.cost:
                break
            longer = {**done, edit.name: edit}
            self.search_further_edits(longer, self.broken_rules_after(longer), left - 1, cost + edit.far)

    def _setup_after(self, done: Mapping[str, FlagEdit]) -> RunSetup:
        return self.setting.with_values({name: edit.after for name, edit in done.items()})

    def _editable_flags(self, one: BrokenRule) -> list[str]:
        return [name for name in flags_named_by_rule(one, self.setting) if name not in self.fixed]


def flags_named_by_rule(one: BrokenRule, setting: RunSetup) -> list[str]:
    """Return the fields that a broken rule's message names; of a size not given, also those it follows from."""
    names: list[str] = [WORLD] if re.match(r"\d+ ranks are not", one.says) else []
    text = re.sub(r"(--[a-z-]*?)(\w+)/(\w+)(-[a-z-]+)", r"\1\2\4 \1\3\4", one.says)
    words = _field_by_flag_spelling()
    for word in re.findall(r"--[a-z0-9][a-z0-9_-]*", text):
        name = words.get(word)
        if name == "num_query_groups" and not setting.config.model.group_query_attention:
            names += FOLLOWS[name]  # each head is a group of its own, whatever the flag says
        elif name is not None:
            names += [name, *(FOLLOWS.get(name, ()) if setting.value(name) is None else ())]
    return list(dict.fromkeys([*names, *MEANT.get(one.rule, ())]))


def candidate_edits(setting: RunSetup, one: BrokenRule, name: str) -> list[FlagEdit]:
    """Return the edits of one flag that may mend a broken rule, the nearest first."""
    before, numbers = (
        setting.value(name),
        {float(text) for text in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.])", one.says)},
    )
    for other in flags_named_by_rule(one, setting):
        value = setting.value(other)
        numbers |= {float(value)} if isinstance(value, (int, float)) and not isinstance(value, bool) else set()
    flag = _flag_declarations_by_field()[name]
    values = dict.fromkeys(
        value for value in [*_candidate_values(flag.kind, before, numbers), flag.default] if value != before
    )
    if name == "hybrid_layer_pattern" and before:
        near = suggested_hybrid_patterns(before, setting.config.parallel.pp)
        values |= {one: None for one in near if one != before}
    example = before is None and name in EXAMPLES
    if example:
        values |= {EXAMPLES[name]: None}
    edits = [
        FlagEdit(name, before, value, example=example, far=flag.weight * _flag_edit_cost(name, before, value, one.says))
        for value in values
    ]
    return sorted(edits, key=lambda edit: edit.far)[:MOST_VALUES]


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


def _flag_edit_cost(name: str, before: Any, after: Any, says: str) -> float:
    """Return how far a value is from another: a ratio of sizes; more where what was given is lost, less where something
    is added, or where the rule itself names it.
    """
    if isinstance(after, bool):
        return (10.0 if name in PURPOSES else 1.0) if after else 2.0
    if isinstance(before, (int, float)) and isinstance(after, (int, float)) and before > 0 and after > 0:
        return 0.5 + abs(math.log2(after / before))
    if after in (None, ()):
        return 2.0
    if before is None:
        return 2.0 if name in EXAMPLES else 0.75
    unchanged = set(after) <= set(before) if isinstance(after, tuple) else str(after) in re.findall(r"[\w+-]+", says)
    return 0.75 if unchanged else 1.0


def _drop_needless_edits(setting: RunSetup, best: Mapping[str, FlagEdit]) -> tuple[FlagEdit, ...]:
    """Return the edits, each with the rules that are broken without it; one that mends none is left out."""
    explained = []
    for name, edit in best.items():
        others = {other: change.after for other, change in best.items() if other != name}
        mends = tuple(dict.fromkeys(one.rule for one in setting.with_values(others).find_broken_rules()))
        explained.append(dataclasses.replace(edit, mends=mends))
    return tuple(edit for edit in explained if edit.mends)


@dataclass(frozen=True, slots=True)
class _FlagDeclaration:
    """A flag's declaration. path: where its field is in a RequestedRun. off: the spelling that turns off a switch which
    is on by default. weight: how much an edit of it counts.
    """

    path: tuple[str, ...]
    kind: Any
    default: Any
    off: str
    weight: float


@cache
def _flag_declarations_by_field() -> dict[str, _FlagDeclaration]:
    """Return field -> declaration of its flag, with an entry `WORLD` for the number of ranks."""
    places = places_of_settings()
    flags = {WORLD: _FlagDeclaration((), int, 1, "", WEIGHT_OF[WORLD])}
    for one, kind in flag_fields(RequestedRun):
        path, owner = places[one.name]
        weight = WEIGHT_OF.get(one.name, WEIGHTS.get(owner, 1.0))
        off = one.metadata["off"] or "--no-" + flag_name(one.name)[2:]
        flags[one.name] = _FlagDeclaration(path, kind, one.default, off, weight)
    return flags


@cache
def _field_by_flag_spelling() -> dict[str, str]:
    """Return spelling of a flag -> its field."""
    return {word: one.name for one, kind in flag_fields(RequestedRun) for word in flag_spellings(one, kind)}
