"""Whether a run can start: one question, asked by the entry scripts before any rank waits for another, and by tools/check_config.py.

    rules between settings      core/config/rules.py, batches and learning rate over time
    the tokenizer               its kind and what that needs; its files where they are here
    kernels                     each that is asked for by name can compute what the run needs on its device
    the machine                 a GPU to record graphs for, a compiler

The last two are asked once the rest holds. What is accepted although it changes nothing comes back as notes, a sentence each.
Torch is imported where something is asked for that depends on the machine, and not otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flags import ConfigError
from megatron.core.config.run import RunConfig
from megatron.core.tokenizers.build import absent_files, build_tokenizer, problems_of, unread, without_unread
from megatron.training.arguments import examine, lines_of


@dataclass(frozen=True, slots=True)
class Preflight:
    """config: resolved, without what changes nothing. problems: (name of a rule, what to say). notes: what is accepted, and why."""

    config: RunConfig
    problems: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def preflight(given: RunConfig, world_size: int, *, device: str = "", files: bool = False) -> Preflight:
    """What keeps this run from starting. device: cpu or cuda, where it will run on another machine; "": this machine's own.

    files: look into the tokenizer's files too, where they are here; the run itself does when it reads them.
    """
    config, problems = examine(given, world_size)
    problems += [("tokenizer", line) for line in tokenizer_problems(config, files=files)]
    config = dataclasses.replace(config, tokenizer=without_unread(config.tokenizer))
    if not problems and _depends_on_the_machine(config):
        from megatron.training.device_checks import machine_problems  # needs torch, which no other answer waits for
        problems += machine_problems(config, device)
    return Preflight(config, tuple(problems), tuple(notes(given, device)))


def notes(given: RunConfig, device: str = "") -> Iterator[str]:
    """A sentence for each setting that is accepted and changes nothing."""
    kind = given.tokenizer.tokenizer_type
    for flag in unread(given.tokenizer).values():
        yield f"{flag} is accepted, as it changes nothing: --tokenizer-type {kind} does not read it"
    cut = given.parallel.expert_tensor_parallel_size
    if cut is not None and not given.model.moe.num_experts:
        yield f"--expert-tensor-parallel-size {cut} is accepted, as it changes nothing: there are no experts"
    if given.parallel.distributed_backend == "nccl" and device != "cuda":
        from megatron.training.device_checks import device_type
        if (device or device_type()) == "cpu":
            yield "--distributed-backend nccl: there is no GPU, so ranks talk by gloo"


def tokenizer_problems(config: RunConfig, *, files: bool) -> list[str]:
    """What is wrong with the tokenizer, by its flags; and by its files, if they are asked for and all are here."""
    tokenizer = config.tokenizer
    if problems := problems_of(tokenizer):
        return problems
    if not files or absent_files(tokenizer):
        return []
    try:
        size = build_tokenizer(without_unread(tokenizer)).vocab_size
    except ConfigError as error:
        return lines_of(error)
    padded = config.model.padded_vocab_size
    return [] if padded is None or padded >= size else [f"--padded-vocab-size {padded} is smaller than the tokenizer's {size} ids"]


def _depends_on_the_machine(config: RunConfig) -> bool:
    """Whether something is asked for that not every machine can do."""
    wishes = config.model.kernel_wishes
    return (any(name not in ("", "auto") and (op, name) != ("grouped_linear", "loop") for op, name in wishes.items())
            or config.graphs.cuda_graph_impl != "none" or config.compilation.compile or bool(config.precision.low.recipe))
