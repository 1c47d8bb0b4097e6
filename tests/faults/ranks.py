"""Runs of real processes in one of which something goes wrong, in a phase that the test chooses.

case = Case("stop", "reduce", rank=1)
(outcome,) = finished(started(case, folder))
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pretrain_gpt
from megatron.core.distributed import ddp
from megatron.core.optimizer import optimizer
from megatron.core.parallel.spec import param_spec_of
from megatron.training import loop
from megatron.training.checkpoint import checkpointing
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.state import step
from megatron.training.state.run import RunContext
from tests.helpers.programme import TINY, checked, write_tokens

ITERATION = 2  # in which it happens
PHASES = ("start-up", "data", "forward", "backward", "reduce", "optimizer", "save", "evaluation")
HOWS = ("raise", "kill", "nan", "flip", "stop", "sleep")
FLAGS = (
    "--train-iters 3 --eval-iters 1 --eval-interval 2 --save-interval 2 --num-layers 2 --global-batch-size 6 "
    "--hidden-dropout 0 --attention-dropout 0"
).split()
WATCHES = {"nan": ["--on-bad-step", "stop"], "flip": ["--check-weight-hash-across-dp-replicas-interval", "1"]}
LAYOUTS = {
    "data": [],
    "tensor": [
        "--tensor-model-parallel-size",
        "3",
        "--num-attention-heads",
        "3",
        "--hidden-size",
        "24",
        "--ffn-hidden-size",
        "48",
    ],
    "pipeline": ["--pipeline-model-parallel-size", "3", "--num-layers", "3"],
}
# A weight that other ranks hold too.
SHARED = {
    "data": "layers.0.mlp.linear_fc1.weight",
    "tensor": "final_layernorm.weight",
    "pipeline": "word_embeddings.weight",
}
PATIENCE = 600.0  # seconds without which nothing here takes


@dataclass(frozen=True)
class Case:
    """What happens, in which phase of iteration ITERATION, on which rank.

    nan: a weight is no number any more; flip: a bit of a weight that others hold too is another. hang, longest: seconds of
    --hang-timeout-minutes and --distributed-timeout-minutes.
    """

    how: str
    phase: str
    rank: int = 1
    layout: str = "data"
    ranks: int = 3
    hang: float = 60.0
    longest: float = 120.0

    @property
    def notice(self) -> float:
        """Seconds until a hang is noticed; at the start, only what the transports allow counts."""
        return (
            0.0 if self.how not in ("stop", "sleep") else 0.9 * self.longest if self.phase == "start-up" else self.hang
        )

    @property
    def name(self) -> str:
        """A name for its folder."""
        return f"{self.how}-{self.phase}-{self.layout}-{self.rank}"


@dataclass(frozen=True)
class Outcome:
    """seconds: from the fault to the end of the last rank that could end. output: of each rank. files: what ranks left."""

    seconds: float
    output: list[str]
    files: str

    @property
    def all(self) -> str:
        """Everything that was said."""
        return "\n".join(self.output)


def rank_runs(case: Case, rank: int, port: int, folder: str) -> None:
    """What a rank does, in a process of its own."""
    handle = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(case.ranks),
        LOCAL_WORLD_SIZE=str(case.ranks),
        OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    flags = [
        *TINY,
        *FLAGS,
        *LAYOUTS[case.layout],
        *WATCHES.get(case.how, []),
        "--data-path",
        f"{folder}/text",
        "--split",
        "60,20,20",
        "--save",
        f"{folder}/saved",
        "--hang-timeout-minutes",
        str(case.hang / 60.0),
        "--distributed-timeout-minutes",
        str(case.longest / 60.0),
    ]

    @guarded_entry_point
    def main() -> None:
        run = initialize_megatron(checked(flags, world_size=case.ranks))
        providers = (
            _planted(case, run, folder)
            if rank == case.rank
            else (pretrain_gpt.datasets_provider, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
        )
        loop.pretrain(run, *providers)

    try:
        main()
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def _planted(
    case: Case, run: RunContext, folder: str
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The providers of datasets, stages and the forward step, one of which or of whose callees fails."""
    stages: list[nn.Module] = []
    happened: list[bool] = []

    def fault(*, always: bool = False) -> None:
        now = (
            always
            or run.progress.iteration == ITERATION - 1
            or (case.phase in ("save", "evaluation") and run.progress.iteration == ITERATION)
        )
        if now and not happened:
            happened.append(True)
            Path(folder, "when").write_text(str(time.time()))
            if case.how == "raise":
                raise ValueError("the planted failure")
            if case.how == "sleep":
                time.sleep(3600)
            if case.how in ("nan", "flip"):
                _spoil(stages, case)
            else:
                os.kill(os.getpid(), signal.SIGKILL if case.how == "kill" else signal.SIGSTOP)

    def before(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def faulty(*arguments: Any, **keywords: Any) -> Any:
            fault()
            return plain(*arguments, **keywords)

        setattr(owner, name, faulty)

    def datasets(*arguments: Any) -> Any:
        if case.phase == "start-up":
            fault(always=True)
        return pretrain_gpt.datasets_provider(*arguments)

    def model(inner: RunContext, stage: Any) -> Any:
        stages.append(pretrain_gpt.model_provider(inner, stage))
        return stages[-1]

    def forward_step(inner: RunContext, batches: Any, stage: Any) -> Any:
        if case.phase == "forward" or (case.phase == "evaluation" and not stage.training):
            fault()
        output, loss = pretrain_gpt.forward_step(inner, batches, stage)
        if case.phase == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: fault())
        return output, loss

    owners = {
        "data": (step, "require_next_batch"),
        "reduce": (ddp, "_start_bucket_reduction"),
        "optimizer": (optimizer, "global_norm"),
        "save": (checkpointing, "weights_of"),
    }
    if case.phase in owners:
        before(*owners[case.phase])
    return datasets, model, forward_step


def _spoil(stages: list[nn.Module], case: Case) -> None:
    """Change one element of a weight."""
    part = SHARED[case.layout] if case.how == "flip" else "mlp.linear_fc1.weight"
    weight = next(
        param for stage in stages for param in stage.parameters() if part in param_spec_of(param).name
    ).data.view(-1)
    if case.how == "nan":
        weight[5] = math.nan
    else:
        weight.view(torch.int32)[5] ^= 1 << 22  # the highest of the mantissa, which no update rounds away


@dataclass
class Going:
    """A case on its way."""

    case: Case
    folder: Path
    store: dist.TCPStore
    processes: list[Any]

    def late(self) -> list[int]:
        """The ranks that can end and have not."""
        return [
            rank
            for rank, process in enumerate(self.processes)
            if process.is_alive() and (rank != self.case.rank or self.case.how != "stop")
        ]


def started(case: Case, folder: Path) -> Going:
    """Start all ranks of a case."""
    folder = folder / case.name
    folder.mkdir()
    write_tokens(folder / "text")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preload"])
    processes = [
        context.Process(target=rank_runs, args=(case, rank, store.port, str(folder)), daemon=True)
        for rank in range(case.ranks)
    ]
    for process in processes:
        process.start()
    return Going(case, folder, store, processes)


def finished(*going: Going) -> list[Outcome]:
    """Wait for all ranks that can end, end the others, and read what they left."""
    deadline, ended = time.monotonic() + PATIENCE, {}
    while time.monotonic() < deadline and len(ended) < len(going):
        time.sleep(0.1)
        for one in going:
            if one.case.name not in ended and not one.late():
                ended[one.case.name] = time.time()
    return [_outcome(one, ended.get(one.case.name, time.time())) for one in going]


def _outcome(going: Going, ended: float) -> Outcome:
    late = going.late()
    for process in going.processes:
        process.kill()
        process.join()
    output = [(going.folder / f"output{rank}").read_text() for rank in range(going.case.ranks)]
    assert not late, f"ranks {late} did not end: {output}"
    assert (going.folder / "when").exists(), f"it never happened: {output}"
    faults = going.folder / "saved" / "faults"
    files = "\n".join(path.read_text() for path in sorted(faults.glob("rank*.txt"))) if faults.is_dir() else ""
    return Outcome(ended - float((going.folder / "when").read_text()), output, files)
