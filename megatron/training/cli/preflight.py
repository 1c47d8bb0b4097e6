"""Whether a run can start: one function, asked by the entry scripts before any rank waits for another, and by tools/check_config.py.

    rules between settings      core/config/rules/engine.py, batches and learning rate over time
    the tokenizer               its kind and what that needs; its files, and the vocabulary that they give
    files                       tokenizer, data and --save are where the flags say
    the machine                 each kernel asked for by name can compute what the run needs; a GPU to record graphs for, a compiler

Files and the machine are looked at once the rest holds. What is accepted although it changes nothing comes back as notes, a sentence
each. Torch is imported where something is asked for that depends on the machine, and not otherwise.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from types import MappingProxyType

from megatron.core.config.adapters import is_trained_parameter
from megatron.core.config.flags.declare import ConfigError, flag_name
from megatron.core.config.flags.idle import idle_settings
from megatron.core.config.plan.network import value_of_run
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.data import DataFiles, TokenizerConfig
from megatron.core.config.settings.model import ModelConfig
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
from megatron.training.launch.elastic import fit_layout_to_ranks
from megatron.training.state.microbatches import BatchSchedule

Problem = tuple[str, str]  # name of a rule, what to say
LOCAL = ("files", "machine")  # rules whose answer can be another on another machine


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """Result of `preflight`. config: resolved, with the vocabulary if the tokenizer was read. problems: what keeps the
    run from starting. notes: what is accepted and changes nothing, and what could not be checked.
    """

    config: RunConfig
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    tokenizer: Tokenizer | None

    @property
    def has_local_problems(self) -> bool:
        """Whether another machine may find other problems."""
        return any(rule in LOCAL for rule, _ in self.problems)


def preflight(
    given: RequestedRun,
    world_size: int,
    *,
    device: str = "",
    files: bool = True,
    reads_data: DataFiles = "none",
    origins: Mapping[str, str] = MappingProxyType({}),
) -> PreflightResult:
    """Check whether this run can start: rules between settings, tokenizer, files, machine. Raises nothing.
    device: cpu or cuda of another machine, where it will run; "": this machine's own. files: whether missing files are
    problems or only notes. reads_data: how the script reads the data that the flags name. origins: setting -> where its
    value came from (`parse_args_unchecked`), if that is known.
    """
    config, problems = resolve_and_examine(given, world_size)
    wrong = tokenizer_flag_problems(config.tokenizer)
    problems += [("tokenizer", line) for line in wrong]
    config = dataclasses.replace(config, tokenizer=drop_unused_settings(config.tokenizer))
    notes, tokenizer = list(() if problems else _notes(given, config, device, origins)), None
    absent = list(_missing_file_problems(config, reads_data=reads_data))
    if files and not problems:
        problems += [("files", line) for line in absent]
    elif not files:
        notes += [f"{line} (on this machine)" for line in absent]
    if not wrong:
        tokenizer, lines = _read_tokenizer_if_here(config.tokenizer)
        problems += [("tokenizer", line) for line in lines]
    if tokenizer is not None and not problems:
        config = dataclasses.replace(config, model=_model_config_with_vocabulary(config, tokenizer))
        problems += broken_rules(config, fit_elastic_layout(given, world_size)[1])
        problems += [("tokenizer", line) for line in _dataset_kind_problems(config, tokenizer, reads_data=reads_data)]
    if not problems and _requests_device_features(config):
        # Needs torch, which no other answer waits for.
        from megatron.training.cli.device_checks import unsupported_by_machine

        problems += unsupported_by_machine(config, device)
    return PreflightResult(config, tuple(problems), tuple(notes), tokenizer)


def _dataset_kind_problems(config: RunConfig, tokenizer: Tokenizer, *, reads_data: DataFiles) -> list[str]:
    """Return why the entry script cannot make samples with this tokenizer: special tokens or a chat template that it lacks."""
    if reads_data != "datasets" or config.data.dataloader_type == "external":
        return []
    return _config_errors_of_call(lambda: dataset_kind_of_run(config, tokenizer))


def _model_config_with_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the model config with the tokenizer's padded vocabulary and its image token, unless a flag names one."""
    model = config.model.with_vocabulary(tokenizer.vocab_size, config.parallel.tp)
    if not model.has_vision or model.vision.image_token_index is not None:
        return model
    token = token_ids_by_name(tokenizer, [IMAGE]).get(IMAGE)
    return dataclasses.replace(model, vision=dataclasses.replace(model.vision, image_token_index=token))


def _notes(given: RequestedRun, config: RunConfig, device: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each setting that was given and changes nothing. config: what `given` was resolved to."""
    idle = idle_settings(given, value_of_run(config))
    yield from (str(one) for one in idle if one.is_noted and origins.get(one.name) != "checkpoint")
    if given.parallel.distributed_backend == "nccl" and device != "cuda":
        from megatron.training.cli.device_checks import device_type

        if (device or device_type()) == "cpu":
            yield "--distributed-backend nccl: there is no GPU, so ranks talk by gloo"


def fit_elastic_layout(config: RequestedRun, world_size: int) -> tuple[RequestedRun, int]:
    """With --elastic, return the config in a layout for these ranks, and how many of them train; else both unchanged."""
    if not config.parallel.elastic or config.train.global_batch_size is None:
        return config, world_size
    return fit_layout_to_ranks(
        config, world_size, lambda config, ranks: {name for name, _ in _resolve_and_list_problems(config, ranks)[1]}
    )


def resolve_and_examine(config: RequestedRun, world_size: int) -> tuple[RunConfig, list[tuple[str, str]]]:
    """Resolve the config, in an elastic layout too: (config, [(rule, message)] for all that is wrong with it)."""
    result, problems = _resolve_and_list_problems(*fit_elastic_layout(config, world_size))
    if config.parallel.elastic and config.train.global_batch_size is None:
        message = "--elastic keeps the global batch, which otherwise follows from the ranks; give --global-batch-size"
        problems.append(("elastic", message))
    return result, problems


def _resolve_and_list_problems(given: RequestedRun, world_size: int) -> tuple[RunConfig, list[tuple[str, str]]]:
    """Resolve the config and apply the rules: (config, [(rule, message)])."""
    config, problems = given.resolve(world_size), []
    # Iterations and evaluation are counted by the last batch size of --step-batch-size-schedule.
    if config.train.step_batch_size_schedule and config.train.micro_batch_size and config.train.seq_length:
        try:
            size = _batch_schedule(config, world_size).final_batch_size
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=size))
        except ConfigError as error:
            problems += [("batch-over-time", message) for message in problems_of_config_error(error)]
    problems += broken_rules(config, world_size)
    if not problems:  # what these work out needs sizes that are known to be sound
        problems += [("trained-parameters", message) for message in _freeze_pattern_problems(config.model)]
        lines = _config_errors_of_call(lambda: _batch_schedule(config, world_size))
        problems += [("batch-over-time", message) for message in lines]
        if not config.train.skip_train:
            build_schedule = partial(OptimizerParamSchedule.build, config.schedule, config.optimizer, config.train)
            problems += [("learning-rate-over-time", message) for message in _config_errors_of_call(build_schedule)]
    return config, problems


def _freeze_pattern_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each pattern of --freeze and --lora-modules-to-save that matches no parameter, and if nothing
    is left to train. The patterns of --freeze-LM and the like may match none.
    """
    adapter = model.adapter
    if not (adapter.freeze or adapter.lora_modules_to_save):
        return
    names = list(global_parameter_shapes(model if model.true_vocab_size else model.with_vocabulary(1, 1)))
    for field in ("freeze", "lora_modules_to_save"):
        for pattern in getattr(adapter, field):
            if pattern not in model.vision.frozen_patterns and not any(fnmatchcase(name, pattern) for name in names):
                yield f"{flag_name(field)} {pattern} matches no parameter of this network; they have names such as {names[0]} and {names[-1]}"
    if not any(is_trained_parameter(name, adapter) for name in names):
        yield f"--freeze {' '.join(adapter.freeze)} leaves nothing to train; name fewer parameters"


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


def _missing_file_problems(config: RunConfig, *, reads_data: DataFiles) -> Iterator[str]:
    """Yield a message for each file that the run needs and that is missing, and if --save cannot be written."""
    for file in missing_tokenizer_files(config.tokenizer):
        yield f"{file}, of the tokenizer, is not here; give the path of a file that is"
    if reads_data != "none" and config.data.dataloader_type != "external":
        yield from _config_errors_of_call(
            lambda: check_data_files(config.data, whole_names=reads_data == "lines" and not config.data.chat.sft)
        )
    if config.checkpoint.save and (why := unwritable_reason(config.checkpoint.save)):
        yield why


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
