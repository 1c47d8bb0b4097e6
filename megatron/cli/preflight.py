"""Whether a run can start: one ordered list of checks, asked once by the entry scripts, before any rank waits for another, and
by `megatron check-config`.

    settings     rules between settings (core/config/rules/engine.py), --elastic, what the tokenizer's kind needs and its files say
    sizes        batches and learning rate over time, names of parameters: worked out from sizes that are known to be sound
    files        tokenizer, data and --save are where the flags say
    vocabulary   the rules again with the tokenizer's vocabulary, and the special tokens that samples need
    machine      each kernel asked for by name can compute what the run needs; a GPU to record graphs for, a compiler

All of "settings" is always asked, so that a launcher is mended once and not five times; another stage only if nothing was found
before it. What is accepted although it changes nothing comes back as notes, a sentence each. Torch is imported where something is
asked for that depends on the machine, and not otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from megatron.core.config.adapters import is_trained_parameter
from megatron.core.config.flags.declare import ConfigError, config_from_namespace, flag_name
from megatron.core.config.flags.idle import idle_settings
from megatron.core.config.plan.network import value_of_run
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.data import DataFiles, TokenizerConfig
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.datasets.data_splits import check_data_files
from megatron.core.datasets.kinds import dataset_kind_of_run
from megatron.core.datasets.special_tokens import IMAGE, token_ids_by_name
from megatron.core.dist_checkpointing.checkpoint_folders import unwritable_reason
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.optimizer.schedule import OptimizerParamSchedule
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import (
    build_tokenizer,
    drop_unused_settings,
    missing_tokenizer_files,
    tokenizer_flag_problems,
)
from megatron.training.checked_run import CheckedRun, Problem
from megatron.training.launch.elastic import fit_layout_to_ranks
from megatron.training.state.microbatches import BatchSchedule

Stage = Literal["settings", "sizes", "files", "vocabulary", "machine"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A run that is being checked. layout: what was given, as --elastic fits it to the `ranks` that train; config: that,
    resolved. device: cpu or cuda of another machine, where it will run; "": this machine's own. reads_data: how the
    script reads the data that the flags name.
    """

    given: RequestedRun
    layout: RequestedRun
    ranks: int
    config: RunConfig
    device: str = ""
    reads_data: DataFiles = "none"

    @property
    def tokenizer_settings(self) -> TokenizerConfig:
        """The settings of the tokenizer that its kind uses."""
        return drop_unused_settings(self.config.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if its files are not here, or cannot be used."""
        return _read_tokenizer_if_here(self.tokenizer_settings)[0]

    def with_vocabulary(self, tokenizer: Tokenizer) -> RunConfig:
        """Return the config with the tokenizer's padded vocabulary and its image token, unless a flag names one."""
        model = self.config.model.with_vocabulary(tokenizer.vocab_size, self.config.parallel.tp)
        if model.has_vision and model.vision.image_token_index is None:
            token = token_ids_by_name(tokenizer, [IMAGE]).get(IMAGE)
            model = dataclasses.replace(model, vision=dataclasses.replace(model.vision, image_token_index=token))
        return dataclasses.replace(self.config, tokenizer=self.tokenizer_settings, model=model)


@dataclass(frozen=True, slots=True)
class Check:
    """One question to a run. problems: what is wrong, each with the name of the rule that it breaks."""

    stage: Stage
    problems: Callable[[Draft], Iterable[Problem]]


def one_rule(name: str, stage: Stage, lines: Callable[[Draft], Iterable[str]]) -> Check:
    """Return the check of a rule that has a name of its own. lines: what is wrong."""
    return Check(stage, lambda draft: ((name, line) for line in lines(draft)))


def check_arguments(
    args: argparse.Namespace,
    world_size: int,
    *,
    reads_data: DataFiles = "none",
    own_problems: Callable[[argparse.Namespace, int], Iterable[str]] = lambda args, world_size: (),
) -> CheckedRun:
    """Check a parsed command line: its flags, those of the script, and all that `preflight` asks. Raises nothing.
    own_problems: (namespace, number of ranks) -> what is wrong with the script's own flags, a line each.
    """
    given = config_from_namespace(RequestedRun, args)
    checked = preflight(given, world_size, reads_data=reads_data, origins=args.origins)
    unread = [("command-line", line) for line in args.problems]
    # What a script says of its own flags needs those that could be read.
    own = () if unread else [("script", line) for line in own_problems(args, world_size)]
    return dataclasses.replace(
        checked,
        problems=(*unread, *checked.problems, *own),
        notes=tuple(dict.fromkeys([*args.messages, *checked.notes])),
        given={name: value for name, value in vars(args).items() if name not in ("messages", "problems", "origins")},
    )


def preflight(
    given: RequestedRun,
    world_size: int,
    *,
    device: str = "",
    files: bool = True,
    reads_data: DataFiles = "none",
    origins: Mapping[str, str] = MappingProxyType({}),
) -> CheckedRun:
    """Check whether this run can start: all of `CHECKS`. Raises nothing.
    device: cpu or cuda of another machine, where it will run; "": this machine's own. files: whether missing files are
    problems or only notes. reads_data: how the script reads the data that the flags name. origins: setting -> where its
    value came from (`parse_args_unchecked`), if that is known.
    """
    draft = dataclasses.replace(make_draft(given, world_size), device=device, reads_data=reads_data)
    problems = find_problems(draft, CHECKS_OF_FLAGS)
    # Which settings have no effect follows from the network, whose sizes must be sound.
    notes = [] if problems else list(idle_setting_notes(draft, origins))
    # Where the run will be on another machine, its files are there.
    if not files:
        notes += [f"{line} (on this machine)" for line in missing_file_problems(draft)]
    later = [check for check in CHECKS[len(CHECKS_OF_FLAGS) :] if files or check.stage != "files"]
    problems = find_problems(draft, later, before=problems)
    config, tokenizer = dataclasses.replace(draft.config, tokenizer=draft.tokenizer_settings), draft.tokenizer
    return CheckedRun(
        config=config if problems or tokenizer is None else draft.with_vocabulary(tokenizer),
        tokenizer=tokenizer,
        problems=tuple(problems),
        notes=tuple(notes),
        origins=origins,
        world_size=world_size,
        ranks=draft.ranks,
        layouts=(given.parallel, draft.layout.parallel),
    )


def resolve_and_examine(config: RequestedRun, world_size: int) -> tuple[RunConfig, list[Problem]]:
    """Resolve the config, in an elastic layout too: (config, [(rule, message)] for what is wrong between its settings)."""
    draft = make_draft(config, world_size)
    return draft.config, find_problems(draft, CHECKS_BETWEEN_SETTINGS)


def find_problems(draft: Draft, checks: Iterable[Check], *, before: Sequence[Problem] = ()) -> list[Problem]:
    """Ask the checks in their order; return `before` and all that is wrong, each once."""
    problems = list(before)
    # Stage by stage: all that one stage finds is mended together.
    for stage, group in groupby(checks, key=lambda check: check.stage):
        if stage == "settings" or not problems:
            problems += [problem for check in group for problem in check.problems(draft)]
    return list(dict.fromkeys(problems))


def make_draft(given: RequestedRun, world_size: int) -> Draft:
    """Return the draft of a run, with --elastic in the layout that fits these ranks."""
    return _draft_of_layout(given, *fit_elastic_layout(given, world_size))


def fit_elastic_layout(config: RequestedRun, world_size: int) -> tuple[RequestedRun, int]:
    """With --elastic, return the config in a layout for these ranks, and how many of them train; else both unchanged."""
    if not config.parallel.elastic or config.train.global_batch_size is None:
        return config, world_size

    def broken(layout: RequestedRun, ranks: int) -> set[str]:
        return {rule for rule, _ in find_problems(_draft_of_layout(config, layout, ranks), CHECKS_BETWEEN_SETTINGS)}

    return fit_layout_to_ranks(config, world_size, broken)


def _draft_of_layout(given: RequestedRun, layout: RequestedRun, ranks: int) -> Draft:
    """Return the draft of a run in exactly this layout."""
    config = layout.resolve(ranks)
    with suppress(ConfigError):  # which one of the checks says
        if (size := _final_batch_size(config, ranks)) is not None:
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=size))
    return Draft(given, layout, ranks, config)


def _final_batch_size(config: RunConfig, ranks: int) -> int | None:
    """Return the last batch size of --step-batch-size-schedule, by which iterations and evaluation are counted; None
    without it. `ConfigError` if the schedule does not fit these ranks.
    """
    train = config.train
    if not (train.step_batch_size_schedule and train.micro_batch_size and train.seq_length):
        return None
    return _batch_schedule(config, ranks).final_batch_size


def _batch_schedule(config: RunConfig, world_size: int) -> BatchSchedule:
    """Return the run's batch sizes; `ConfigError` if they do not fit these ranks."""
    ranks = max(1, config.parallel.data_parallel_size(world_size))
    schedule = BatchSchedule.build(config.train, data_parallel_size=ranks, seq_length=config.train.seq_length)
    schedule.require_divisible_sizes()
    return schedule


def _config_errors_of_call(attempt: Callable[[], object]) -> list[str]:
    """Call `attempt`; return the lines of its `ConfigError`, or none."""
    try:
        attempt()
    except ConfigError as error:
        return problems_of_config_error(error)
    return []


def problems_of_config_error(error: ConfigError) -> list[str]:
    """Return the problems that a `ConfigError` lists, a line each."""
    lines = str(error).splitlines()
    return [line.strip() for line in lines[1:]] or lines


def _final_batch_problems(draft: Draft) -> list[str]:
    return _config_errors_of_call(lambda: _final_batch_size(draft.config, draft.ranks))


def _trained_parameter_problems(draft: Draft) -> Iterator[str]:
    """Yield a message for each pattern of --freeze and --lora-modules-to-save that matches no parameter, and if nothing
    is left to train. The patterns of --freeze-LM and the like may match none.
    """
    model = draft.config.model
    adapter = model.adapter
    if not (adapter.freeze or adapter.lora_modules_to_save):
        return
    names = list(global_parameter_shapes(model if model.true_vocab_size else model.with_vocabulary(1, 1)))
    for setting in ("freeze", "lora_modules_to_save"):
        for pattern in getattr(adapter, setting):
            if pattern not in model.vision.frozen_patterns and not any(fnmatchcase(name, pattern) for name in names):
                yield f"{flag_name(setting)} {pattern} matches no parameter of this network; they have names such as {names[0]} and {names[-1]}"
    if not any(is_trained_parameter(name, adapter) for name in names):
        yield f"--freeze {' '.join(adapter.freeze)} leaves nothing to train; name fewer parameters"


def _batch_problems(draft: Draft) -> list[str]:
    return _config_errors_of_call(lambda: _batch_schedule(draft.config, draft.ranks))


def _learning_rate_problems(draft: Draft) -> list[str]:
    config = draft.config
    if config.train.skip_train:
        return []
    return _config_errors_of_call(lambda: OptimizerParamSchedule.build(config.schedule, config.optimizer, config.train))


def _elastic_problems(draft: Draft) -> Iterator[str]:
    if draft.given.parallel.elastic and draft.given.train.global_batch_size is None:
        yield "--elastic keeps the global batch, which otherwise follows from the ranks; give --global-batch-size"


def missing_file_problems(draft: Draft) -> Iterator[str]:
    """Yield a message for each file that the run needs and that is missing, and if --save cannot be written."""
    data, whole_names = draft.config.data, draft.reads_data == "lines" and not draft.config.data.chat.sft
    for file in missing_tokenizer_files(draft.tokenizer_settings):
        yield f"{file}, of the tokenizer, is not here; give the path of a file that is"
    if draft.reads_data != "none" and data.dataloader_type != "external":
        yield from _config_errors_of_call(lambda: check_data_files(data, whole_names=whole_names))
    if draft.config.checkpoint.save and (why := unwritable_reason(draft.config.checkpoint.save)):
        yield why


def _tokenizer_flag_problems(draft: Draft) -> list[str]:
    return tokenizer_flag_problems(draft.config.tokenizer)


def _tokenizer_file_problems(draft: Draft) -> list[str]:
    """Return what is wrong with the contents of the tokenizer's files, if they are here."""
    return [] if _tokenizer_flag_problems(draft) else _read_tokenizer_if_here(draft.tokenizer_settings)[1]


def _rule_problems_with_vocabulary(draft: Draft) -> Iterator[Problem]:
    if (tokenizer := draft.tokenizer) is not None:
        yield from broken_rules(draft.with_vocabulary(tokenizer), draft.ranks)


def _special_token_problems(draft: Draft) -> list[str]:
    """Return why the script cannot make samples with this tokenizer: special tokens or a chat template that it lacks."""
    tokenizer = draft.tokenizer
    if tokenizer is None or draft.reads_data != "datasets" or draft.config.data.dataloader_type == "external":
        return []
    config = draft.with_vocabulary(tokenizer)
    return _config_errors_of_call(lambda: dataset_kind_of_run(config, tokenizer))


def _machine_problems(draft: Draft) -> list[str]:
    config = draft.config
    if not _requests_device_features(config):
        return []
    # Needs torch, which no other answer waits for.
    from megatron.cli.device_checks import unsupported_by_machine

    return unsupported_by_machine(config, draft.device)


def idle_setting_notes(draft: Draft, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each setting that was given and changes nothing."""
    idle = idle_settings(draft.given, value_of_run(draft.config))
    yield from (str(one) for one in idle if one.is_noted and origins.get(one.name) != "checkpoint")
    if draft.given.parallel.distributed_backend == "nccl" and draft.device != "cuda":
        from megatron.cli.device_checks import device_type

        if (draft.device or device_type()) == "cpu":
            yield "--distributed-backend nccl: there is no GPU, so ranks talk by gloo"


def _read_tokenizer_if_here(config: TokenizerConfig) -> tuple[Tokenizer | None, list[str]]:
    """Build the tokenizer if its files are here: (tokenizer or None, messages about its files)."""
    if missing_tokenizer_files(config):
        return None, []
    files = (config.vocab_file, config.merge_file, config.tokenizer_model)
    return _read_tokenizer(config, tuple(os.path.getmtime(file) for file in files if file is not None))


@lru_cache(maxsize=2)
def _read_tokenizer(config: TokenizerConfig, times: tuple[float, ...]) -> tuple[Tokenizer | None, list[str]]:
    """Build the tokenizer: (tokenizer or None, messages about its files). times: of modification, for the cache."""
    try:
        return build_tokenizer(config), []
    except ConfigError as error:
        return None, problems_of_config_error(error)


def _requests_device_features(config: RunConfig) -> bool:
    """Whether kernels, graphs, compilation or low precision are asked for, which not every machine supports."""
    wishes = config.model.all_requested_kernels
    return (
        any(name not in ("", "auto") and (op, name) != ("grouped_linear", "loop") for op, name in wishes.items())
        or config.graphs.cuda_graph_impl != "none"
        or config.compilation.compile
        or bool(config.precision.low.recipe_name)
    )


# What flags say of each other; searches ask no more of their candidates.
CHECKS_BETWEEN_SETTINGS: tuple[Check, ...] = (
    one_rule("batch-over-time", "settings", _final_batch_problems),
    Check("settings", lambda draft: broken_rules(draft.config, draft.ranks)),
    one_rule("trained-parameters", "sizes", _trained_parameter_problems),
    one_rule("batch-over-time", "sizes", _batch_problems),
    one_rule("learning-rate-over-time", "sizes", _learning_rate_problems),
    one_rule("elastic", "settings", _elastic_problems),
)
CHECKS_OF_FLAGS = (*CHECKS_BETWEEN_SETTINGS, one_rule("tokenizer", "settings", _tokenizer_flag_problems))
CHECKS: tuple[Check, ...] = (
    *CHECKS_OF_FLAGS,
    one_rule("files", "files", missing_file_problems),
    one_rule("tokenizer", "settings", _tokenizer_file_problems),
    Check("vocabulary", _rule_problems_with_vocabulary),
    one_rule("tokenizer", "vocabulary", _special_token_problems),
    one_rule("machine", "machine", _machine_problems),
)
