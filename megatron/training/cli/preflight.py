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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from megatron.core.config.adapters import is_trained
from megatron.core.config.flags import ConfigError, flag_name
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.data import DataFiles, TokenizerConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.datasets.marks import IMAGE, named_tokens
from megatron.core.datasets.paths import check_data_files
from megatron.core.dist_checkpointing.store import why_unwritable
from megatron.core.models.describe import parameter_shapes
from megatron.core.optimizer.schedule import Schedule
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import (
    build_tokenizer,
    missing_files,
    problems_of,
    unused_settings,
    without_unused_settings,
)
from megatron.training.data.microbatches import BatchSchedule
from megatron.training.launch.elastic import fit_layout

Problem = tuple[str, str]  # name of a rule, what to say
LOCAL = ("files", "machine")  # rules whose answer can be another on another machine


@dataclass(frozen=True, slots=True)
class Preflight:
    """config: resolved, without what changes nothing, and with the vocabulary where the tokenizer could be read.

    problems: what keeps the run from starting. notes: what is accepted, and why; what could not be looked at.
    """

    config: RunConfig
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    tokenizer: Tokenizer | None


def preflight(
    given: RequestedRun, world_size: int, *, device: str = "", files: bool = True, reads_data: DataFiles = "none"
) -> Preflight:
    """What keeps this run from starting. device: cpu or cuda, where it will run on another machine; "": this machine's own.

    files: files that are not here are problems; otherwise notes. reads_data: how the script reads the data that the flags name.
    """
    config, problems = resolve_and_examine(given, world_size)
    wrong = problems_of(config.tokenizer)
    problems += [("tokenizer", line) for line in wrong]
    config = dataclasses.replace(config, tokenizer=without_unused_settings(config.tokenizer))
    notes, tokenizer, absent = (
        list(ineffective_settings(given, device)),
        None,
        list(_missing_files(config, reads_data=reads_data)),
    )
    if files and not problems:
        problems += [("files", line) for line in absent]
    elif not files:
        notes += [f"{line} (on this machine)" for line in absent]
    if not wrong and not missing_files(config.tokenizer):
        tokenizer, lines = _read_tokenizer(
            config.tokenizer, tuple(map(os.path.getmtime, _tokenizer_file_names(config.tokenizer)))
        )
        problems += [("tokenizer", line) for line in lines]
    if tokenizer is not None and not problems:
        config = dataclasses.replace(config, model=_with_tokenizer(config, tokenizer))
        problems += broken_rules(config, fit_to_ranks(given, world_size)[1])
    if not problems and _depends_on_the_machine(config):
        from megatron.training.cli.device_checks import machine_problems  # needs torch, which no other answer waits for

        problems += machine_problems(config, device)
    return Preflight(config, tuple(problems), tuple(notes), tokenizer)


def _with_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the network with the tokenizer's vocabulary, padded, and its token for images unless a flag names one."""
    model = config.model.with_vocabulary(tokenizer.vocab_size, config.parallel.tp)
    if not model.has_vision or model.vision.image_token_index is not None:
        return model
    token = named_tokens(tokenizer, [IMAGE]).get(IMAGE)
    return dataclasses.replace(model, vision=dataclasses.replace(model.vision, image_token_index=token))


def ineffective_settings(given: RequestedRun, device: str = "") -> Iterator[str]:
    """A sentence for each setting that is accepted and changes nothing."""
    kind = given.tokenizer.tokenizer_type
    for flag in unused_settings(given.tokenizer).values():
        yield f"{flag} is accepted, as it changes nothing: --tokenizer-type {kind} does not read it"
    cut = given.parallel.expert_tensor_parallel_size
    if cut is not None and not given.model.moe.num_experts:
        yield f"--expert-tensor-parallel-size {cut} is accepted, as it changes nothing: there are no experts"
    if given.parallel.distributed_backend == "nccl" and device != "cuda":
        from megatron.training.cli.device_checks import device_type

        if (device or device_type()) == "cpu":
            yield "--distributed-backend nccl: there is no GPU, so ranks talk by gloo"


def fit_to_ranks(config: RequestedRun, world_size: int) -> tuple[RequestedRun, int]:
    """With --elastic, the config in a layout for these ranks, and how many of them train."""
    if not config.parallel.elastic or config.train.global_batch_size is None:
        return config, world_size
    return fit_layout(
        config, world_size, lambda config, ranks: {name for name, _ in _resolve_and_check(config, ranks)[1]}
    )


def resolve_and_examine(config: RequestedRun, world_size: int) -> tuple[RunConfig, list[tuple[str, str]]]:
    """The config resolved, and (name of a rule, what to say) of all that is wrong with it."""
    result, problems = _resolve_and_check(*fit_to_ranks(config, world_size))
    if config.parallel.elastic and config.train.global_batch_size is None:
        problems.append(
            (
                "elastic",
                "--elastic keeps the global batch, which otherwise follows from the ranks; give --global-batch-size",
            )
        )
    return result, problems


def _resolve_and_check(given: RequestedRun, world_size: int) -> tuple[RunConfig, list[tuple[str, str]]]:
    config, problems = given.resolve(world_size), []
    if config.train.step_batch_size_schedule and config.train.micro_batch_size and config.train.seq_length:
        try:
            config = _with_last_batch_size(config, world_size)
        except ConfigError as error:
            problems += [("batch-over-time", message) for message in problem_lines(error)]
    problems += broken_rules(config, world_size)
    if not problems:  # what these work out needs sizes that are known to be sound
        problems += [("trained-parameters", message) for message in _pattern_problems(config.model)]
        problems += [
            ("batch-over-time", message)
            for message in _problems_of_attempt(
                lambda: BatchSchedule.build(
                    config.train,
                    data_parallel_size=config.parallel.data_parallel_size(world_size),
                    seq_length=config.train.seq_length,
                ).check()
            )
        ]
        if not config.train.skip_train:
            problems += [
                ("learning-rate-over-time", message)
                for message in _problems_of_attempt(
                    lambda: Schedule.build(config.schedule, config.optimizer, config.train)
                )
            ]
    return config, problems


def _pattern_problems(model: ModelConfig) -> Iterator[str]:
    """Patterns of --freeze and --lora-modules-to-save that match no parameter, and those that leave nothing to train.

    What --freeze-LM and the like stand for holds of any network, with or without what a pattern names.
    """
    adapter = model.adapter
    if not (adapter.freeze or adapter.lora_modules_to_save):
        return
    names = list(parameter_shapes(model if model.true_vocab_size else model.with_vocabulary(1, 1)))
    for field in ("freeze", "lora_modules_to_save"):
        for pattern in getattr(adapter, field):
            if pattern not in model.vision.frozen and not any(fnmatchcase(name, pattern) for name in names):
                yield f"{flag_name(field)} {pattern} matches no parameter of this network; they have names such as {names[0]} and {names[-1]}"
    if not any(is_trained(name, adapter) for name in names):
        yield f"--freeze {' '.join(adapter.freeze)} leaves nothing to train; name fewer parameters"


def _with_last_batch_size(config: RunConfig, world_size: int) -> RunConfig:
    """Horizons and evaluation count in the batch that --step-batch-size-schedule ends with."""
    schedule = BatchSchedule.build(
        config.train,
        data_parallel_size=max(1, config.parallel.data_parallel_size(world_size)),
        seq_length=config.train.seq_length,
    )
    schedule.check()
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, global_batch_size=schedule.final_batch_size)
    )


def _problems_of_attempt(attempt: Callable[[], object]) -> list[str]:
    """What an attempt finds wrong with the settings."""
    try:
        attempt()
    except ConfigError as error:
        return problem_lines(error)
    return []


def problem_lines(error: ConfigError) -> list[str]:
    """Every problem that an error lists."""
    lines = str(error).splitlines()
    return [line.strip() for line in lines[1:]] or lines


def _missing_files(config: RunConfig, *, reads_data: DataFiles) -> Iterator[str]:
    """Files that the run will want and that are not here, and a folder that it cannot write."""
    for file in missing_files(config.tokenizer):
        yield f"{file}, of the tokenizer, is not here; give the path of a file that is"
    if reads_data != "none" and config.data.dataloader_type != "external":
        yield from _problems_of_attempt(
            lambda: check_data_files(config.data, whole_names=reads_data == "lines" and not config.data.chat.sft)
        )
    if config.checkpoint.save and (why := why_unwritable(config.checkpoint.save)):
        yield why


def _tokenizer_file_names(config: TokenizerConfig) -> list[str]:
    return [file for file in (config.vocab_file, config.merge_file, config.tokenizer_model) if file is not None]


@lru_cache(maxsize=2)
def _read_tokenizer(config: TokenizerConfig, times: tuple[float, ...]) -> tuple[Tokenizer | None, list[str]]:
    """(the tokenizer, what is wrong with its files). times: when they were written."""
    try:
        return build_tokenizer(config), []
    except ConfigError as error:
        return None, problem_lines(error)


def _depends_on_the_machine(config: RunConfig) -> bool:
    """Whether something is asked for that not every machine can do."""
    wishes = config.model.kernel_requests
    return (
        any(name not in ("", "auto") and (op, name) != ("grouped_linear", "loop") for op, name in wishes.items())
        or config.graphs.cuda_graph_impl != "none"
        or config.compilation.compile
        or bool(config.precision.low.recipe)
    )
