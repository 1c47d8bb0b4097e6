#!/usr/bin/env python3
"""Every kernel that this machine has for an operation, in turn, at the sizes of a layer in training.

    python benchmarks/kernels.py                       on a GPU the sizes of GPT 1.3B in bf16, on a CPU a small layer in fp32
    python benchmarks/kernels.py --compile             also what torch's compiler makes of the plain formula
    python benchmarks/kernels.py --hidden 4096 --ffn 14336 --heads 32 --groups 8 --length 4096 --micro-batch 4 --vocabulary 32000

A row is forward and backward together, the median of the rounds, and a multiple of the kernel that a run takes unasked. On a GPU a round is --calls calls behind one another
between two events of the device, and the host's time until a call returns stands beside it: where that is the longer, a run waits for launches. On a CPU both are the clock's.
Bytes are the least that must move: inputs, outputs and their gradients, once each; products and attention are counted in operations, attention over the causal half.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu import results  # noqa: E402
from benchmarks.gpu.timing import Timed, clock_of, one_round  # noqa: E402
from megatron.core.kernels.choice.table import CANDIDATES, KernelRequirements  # noqa: E402
from megatron.core.kernels.ops import reference  # noqa: E402
from megatron.core.kernels.ops.linear_loss import VocabularyShard  # noqa: E402
from megatron.core.kernels.ops.mask import AttentionMaskSpec  # noqa: E402
from megatron.core.parallel.device import disable_malloc_trim  # noqa: E402
from megatron.core.parallel.mesh import Axis  # noqa: E402
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy  # noqa: E402

SIZES = {"cuda": (2048, 8192, 16, 2048, 8, 50304, 64), "cpu": (512, 2048, 8, 512, 2, 16384, 8)}
NAMES = ("hidden", "ffn", "heads", "length", "micro_batch", "vocabulary", "experts")
PLAIN = {
    "layer_norm": reference.layer_norm,
    "rms_norm": reference.rms_norm,
    "gated_activation": reference.gated_activation,
    "bias_activation": reference.bias_activation,
    "rotary": reference.rotary,
    "residual_norm": reference.residual_norm,
}


@dataclass(frozen=True)
class Job:
    """One operation. call: (kernel, inputs) -> output or outputs; apart: what is done where a candidate has no kernel; flops: of both passes."""

    op: str
    inputs: tuple[Tensor, ...]
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    apart: Callable[..., Tensor | tuple[Tensor, ...]] | None = None
    flops: float = 0.0

    def passes(self, kernel: Callable | None) -> Callable[[], None]:
        """Both passes by this kernel. The gradient of each output is the same in all rounds."""
        leaves = [one.detach().requires_grad_() for one in self.inputs]
        run = partial(self.call, kernel) if kernel is not None else self.apart
        gradients = [torch.ones_like(one) for one in _several(run(*leaves))]
        return lambda: torch.autograd.grad(_several(run(*leaves)), leaves, gradients) and None

    def bytes(self) -> int:
        """The least that moves."""
        outputs = _several(self.call(PLAIN[self.op], *self.inputs)) if self.op in PLAIN else self.inputs[:1]
        return 2 * sum(one.nbytes for one in (*self.inputs, *outputs))


def _several(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def jobs(sizes: argparse.Namespace, device: str, dtype: torch.dtype) -> Iterator[Job]:
    """The operations of a layer, and of the loss."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    s, b, h, f, n = sizes.length, sizes.micro_batch, sizes.hidden, sizes.ffn, sizes.heads
    d, groups = h // n, sizes.groups or n
    yield Job(
        "attention",
        (draw(s, b, n, d), draw(s, b, groups, d), draw(s, b, groups, d)),
        lambda op, q, k, v: op(q, k, v, AttentionMaskSpec(), 0.0),
        flops=7.0 * b * n * s * s * d,
    )
    x, weight, bias = draw(s, b, h), draw(h), draw(h)
    yield Job("layer_norm", (x, weight, bias), lambda op, *given: op(*given, 1e-5))
    yield Job("rms_norm", (x, weight), lambda op, *given: op(*given, 1e-5))
    yield Job(
        "residual_norm",
        (x, draw(s, b, h), weight, bias),
        lambda op, *given: op(*given, 1e-5),
        apart=lambda x, update, weight, bias: (total := x + update, F.layer_norm(total, (h,), weight, bias, 1e-5)),
    )
    yield Job("gated_activation", (draw(s, b, 2 * f),), lambda op, x: op(x, "silu"))
    yield Job(
        "bias_activation",
        (draw(s, b, f), draw(f)),
        lambda op, x, shift: op(x, shift, "gelu_tanh"),
        apart=lambda x, shift: F.gelu(x + shift, approximate="tanh"),
    )
    angles = (
        torch.arange(s, device=device)[:, None] / 10000 ** (torch.arange(d // 2, device=device) / (d // 2))
    ).repeat(1, 2)[:, None, None]
    yield Job("rotary", (draw(s, b, n, d),), lambda op, x: op(x, angles.cos(), angles.sin(), False))
    targets = torch.randint(0, sizes.vocabulary - 50, (s * b,), device=device)
    words = VocabularyShard(0, sizes.vocabulary, None, lambda stated: stated)
    yield Job(
        "cross_entropy",
        (draw(s * b, h), draw(sizes.vocabulary, h) * h**-0.5),
        lambda op, x, table: op(x, table, None, targets, words),
        apart=lambda x, table: vocab_parallel_cross_entropy(
            F.linear(x, table)[:, None], targets[:, None], Axis("tp"), sizes.vocabulary
        )[:, 0],
        flops=6.0 * s * b * h * sizes.vocabulary,
    )
    choices = torch.rand(s * b, sizes.experts, device=device).topk(2).indices
    counts, order = torch.bincount(choices.flatten(), minlength=sizes.experts), choices.flatten().argsort(stable=True)
    yield Job(
        "grouped_linear",
        (draw(2 * s * b, h), draw(sizes.experts, f // 4, h) * h**-0.5),
        lambda op, x, table: op(x, table, counts),
        flops=12.0 * s * b * h * (f // 4),
    )
    places = torch.empty_like(order).scatter_(0, order, torch.arange(2 * s * b, device=device)).view(-1, 2)
    yield Job("permute", (draw(s * b, h),), lambda op, x: op(x, (order // 2)[:, None], places, False, False))


def seconds(passes: dict[str, Callable[[], None]], rounds: int, calls: int, device: str) -> dict[str, Timed]:
    """The median of each, in turn. The first rounds, in which kernels are compiled and tuned, do not count."""
    times: dict[str, list[Timed]] = {name: [] for name in passes}
    for turn in range(rounds + 2):
        for name, work in passes.items():
            result = one_round(work, torch.device(device), calls)
            if turn >= 2:
                times[name].append(result)
    return {
        name: Timed(statistics.median(one.device for one in samples), statistics.median(one.host for one in samples))
        for name, samples in times.items()
    }


def measure(job: Job, need: KernelRequirements, options: argparse.Namespace) -> None:
    """Print the rows of one operation."""
    passes, refused = {}, {}
    if results.path() is not None and results.done("job", op=job.op):
        return
    fitting = [(one, one.unsupported_reason(need)) for one in CANDIDATES if one.op == job.op and one.name != "local"]
    kernels = [(one.name, None if reason else one.loaded_kernel, reason) for one, reason in fitting]
    if options.compile and job.op in PLAIN:
        kernels.append(("compiled", torch.compile(PLAIN[job.op]), ""))
    for name, kernel, reason in kernels:
        try:
            if not reason:
                work = job.passes(kernel)
                work()
                passes[name] = work
        except Exception as error:  # noqa: BLE001 - whatever a kernel says, the others are measured
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            results.fail("kernel", {"op": job.op, "kernel": name}, error)
        if reason:
            refused[name] = reason
    times = seconds(passes, options.rounds, options.calls, need.device)
    unasked = next(
        one.name
        for one in CANDIDATES
        if one.op == job.op and not one.unsupported_reason(need) and not one.unasked(need)
    )
    for name, timed in times.items():
        took, host = timed.device, f"  host {1e3 * timed.host:8.3f} ms" if need.device == "cuda" else ""
        rate = f"{job.flops / took / 1e12:8.2f} TFLOP/s" if job.flops else f"{job.bytes() / took / 1e9:8.1f} GB/s"
        ratio = took / times[unasked].device
        print(f"  {job.op:16} {name:18} {1e3 * took:9.3f} ms{host}  {rate:16}  {ratio:5.2f} x {unasked}", flush=True)
        results.keep("kernel", op=job.op, kernel=name, ms=1e3 * took, host_ms=1e3 * timed.host, ratio=ratio)
    for name, reason in refused.items():
        print(f"  {job.op:16} {name:18} not here: {reason}", flush=True)
    results.keep("job", op=job.op)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in NAMES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--groups", type=int, help="of keys and values; left out: as many as heads")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, help="of a round, one behind the other (20 on a GPU, 1 on a CPU)")
    parser.add_argument("--only", nargs="+", help="operations")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    disable_malloc_trim(torch.device(device))  # as initialize_megatron does
    for name, usual in zip(NAMES, SIZES[device], strict=True):
        setattr(options, name, getattr(options, name) or usual)
    options.calls = options.calls or (20 if device == "cuda" else 1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    need = KernelRequirements(device=device, dtype=dtype, head_sizes=(options.hidden // options.heads,) * 2)
    print(
        ", ".join(f"{name.replace('_', ' ')} {getattr(options, name)}" for name in NAMES)
        + f"; {dtype} on {device}; forward and backward, by {clock_of(torch.device(device))} around {options.calls} calls"
    )
    torch.manual_seed(0)
    for job in jobs(options, device, dtype):
        if not options.only or job.op in options.only:
            measure(job, need, options)
            results.free()


if __name__ == "__main__":
    main()
