"""Run a program of Megatron-LM itself on a machine without a GPU, and keep the losses that it logs.

    python run_pretrain.py SOURCES JOBS.json        with CUDA_DEVICE_MAX_CONNECTIONS=1

SOURCES is the folder of a release's sources; JOBS.json a list of {folder, program, arguments, ranks}, where program is one of
its scripts (pretrain_gpt.py). Nothing of it is changed but what asks for a GPU, so that a checkpoint of it has the whole
namespace of its parser. `losses.json` in the folder gets the losses, the norm of the gradient and the loss scale of
every iteration, as the program logs them on its last rank. Ranks are forked, since imports take longer than runs.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import socket
import sys
import traceback
import types
import typing
from pathlib import Path
from typing import Any

import torch
import typing_extensions

HERE = Path(__file__).resolve().parent


class Stream:
    """Stands for a stream and an event of CUDA: everything was done when it was asked for."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None:
        """Nothing is on its way."""

    wait_event = wait = synchronize = record = wait_stream

    def record_event(self, *_: Any) -> Stream:
        """An event that has happened."""
        return Stream()

    def elapsed_time(self, _: Any) -> float:
        """A time that no result depends on."""
        return 1.0

    def query(self) -> bool:
        """Whether all is done."""
        return True


def answer_programs() -> None:
    """What Megatron-LM's programs, and not Megatron Core's layers, ask of CUDA."""
    cuda = torch.cuda
    cuda.is_available, cuda.device_count = lambda: True, lambda: 1
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        major=8, minor=0, total_memory=2**34, name="none", multi_processor_count=1
    )
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.memory_stats = lambda *_: dict.fromkeys(
        (
            *(f"{kind}_bytes.all.{when}" for kind in ("allocated", "reserved") for when in ("current", "peak")),
            *("allocation.all.current", "num_alloc_retries", "num_ooms"),
        ),
        0,
    )
    cuda.Stream = cuda.Event = Stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    start = torch.distributed.init_process_group

    def without_device(*arguments: Any, **named: Any) -> Any:
        named.pop("device_id", None)
        return start(*arguments, **named)

    torch.distributed.init_process_group = without_device


def keep_losses(training: types.ModuleType) -> None:
    """Write what the program logs. training: its module `megatron.training.training`."""
    log, steps = training.training_log, []
    signature = inspect.signature(log)

    def log_and_keep(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        norm, losses = given.get("grad_norm"), given["loss_dict"]
        steps.append(
            {
                "iteration": given["iteration"],
                "losses": {name: float(value.float().mean()) for name, value in losses.items()},
                "grad_norm": None if norm is None else float(norm),
                "loss_scale": float(given["loss_scale"]),
                "skipped": bool(given["skipped_iter"]),
            }
        )
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            Path("losses.json").write_text(json.dumps(steps, indent=1))
        return log(*arguments, **named)

    training.training_log = log_and_keep


def prepare(sources: Path) -> None:
    """Import a release's sources, answered for what they ask of a GPU."""
    typing.override = typing_extensions.override  # of Python 3.12, which releases since 0.18 are for
    sys.path[:0] = [str(sources), str(HERE)]
    import without_gpu
    from releases import fill_in, index_samples, let_optimizers_be_distributed

    fill_in()
    without_gpu.answer_for_cuda()
    answer_programs()
    import megatron.core  # noqa: F401

    without_gpu.keep_no_random_states()
    without_gpu.multiply_groups()
    without_gpu.do_without_transformer_engine()
    index_samples()
    let_optimizers_be_distributed()
    import megatron.training.initialize
    import megatron.training.training

    megatron.training.initialize._compile_dependencies = lambda *_, **__: None
    keep_losses(megatron.training.training)


def run_rank(script: Path, folder: Path, arguments: list[str]) -> None:
    """One rank of a run in a folder; what it prints goes to `rank<R>.log` there."""
    os.chdir(folder)
    log = os.open(f"rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [script.name, *arguments]
    # Not by `runpy`, after which a process that it spawns would import the program.
    exec(compile(script.read_bytes(), script, "exec"), {"__name__": "__main__", "__file__": str(script)})


def run_in_forks(script: Path, folder: Path, arguments: list[str], ranks: int) -> bool:
    """All ranks of a run, forked from what is imported here. Returns whether none failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
            code = 1
            try:
                run_rank(script, folder, arguments)
                code = 0
            except BaseException:  # of a program that was not written here
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children[child] = rank
    good = True
    while children:
        child, status = os.wait()
        rank = children.pop(child, None)
        if rank is not None and status:
            good = False
            for other in children:  # which would wait for it
                os.kill(other, signal.SIGKILL)
    return good


if __name__ == "__main__":  # which a process that it spawns is not
    root, plan = Path(sys.argv[1]).resolve(), json.loads(Path(sys.argv[2]).read_text())
    prepare(root)
    for job in plan:
        done = run_in_forks(root / job["program"], Path(job["folder"]), job["arguments"], job["ranks"])
        print(f"{job['folder']}: {'done' if done else 'FAILED, see its rank logs'}", flush=True)
