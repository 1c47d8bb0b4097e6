#!/usr/bin/env python3
"""The pieces of a training step on a GPU, each in a minute or two; every figure is written as soon as it is found.

    python benchmarks/gpu/pieces.py rates attention masks plans optimizer nccl       (all, or some)
    python benchmarks/gpu/pieces.py --small masks                                    sizes that a stand-in computes, too

rates       what matmuls of a network's shapes reach, forward and backward, with gradients added by the matmul or after it; copies; fp8
attention   each backend that fits, forward and backward, and which one torch's attention takes unasked
masks       documents, windows, caps, sinks: time, memory, and what the first call costs; rows without a visible key
plans       what the first call with a new shape costs (cuDNN builds a plan a shape), with cuDNN and without
optimizer   an update of GPT 1.3B: time, and bytes a parameter at 3 TB/s
nccl        the collective calls of the project at one rank, in place, averaged, and a graph captured beside NCCL's watchdog
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import results
from benchmarks.gpu.layers import GPT, trainer_of
from benchmarks.gpu.timing import both_passes, timed
from megatron.core.kernels.choice.table import CANDIDATES, KernelRequirements
from megatron.core.kernels.ops import flex, fused, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.parallel.device import CudaGraphPool

GPU = torch.device("cuda")
BF16 = torch.bfloat16
# Products of a layer: (name, inputs, outputs).
SHAPES = (
    ("1.3b qkv", 2048, 6144),
    ("1.3b proj", 2048, 2048),
    ("1.3b fc1", 2048, 8192),
    ("1.3b fc2", 8192, 2048),
    ("1.3b head", 2048, 50304),
    ("8b qkv", 4096, 6144),
    ("8b proj", 4096, 4096),
    ("8b fc1", 4096, 28672),
    ("8b fc2", 14336, 4096),
    ("8b head", 4096, 50304),
)
# Attention: (name, tokens, batch, heads, groups, head size).
ATTENTION = (
    ("1.3b", 2048, 8, 16, 16, 128),
    ("8b", 4096, 4, 32, 8, 128),
    ("8b 8k", 8192, 2, 32, 8, 128),
    ("125m", 1024, 8, 12, 12, 64),
)
BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal numbers on the GPU: of zeros or ones a matmul takes less power, and less time."""
    return torch.randn(shape, device=GPU, dtype=dtype)


def seconds(work: Callable[[], Any], calls: int = 10, rounds: int = 5) -> float:
    """Of a call, by events."""
    return timed(work, GPU, calls=calls, rounds=rounds).device


def milliseconds(work: Callable[[], Any]) -> dict[str, Any]:
    """Of a call that takes long."""
    return {"ms": 1e3 * seconds(work, 5, 2)}


def rates(small: bool) -> None:
    """What this GPU reaches."""
    size, tokens = (256, 64) if small else (8192, 16384)

    def products() -> dict[str, Any]:
        a, b = draw(size, size), draw(size, size)
        work = 2 * size**3 / 1e12
        first = work / seconds(lambda: a @ b)
        began = time.perf_counter()
        last = first
        while time.perf_counter() - began < (0 if small else 6):  # what is left when the chip is warm
            last = work / seconds(lambda: a @ b, 50, 1)
        return {"tflops": first, "tflops_warm": last}

    def copies() -> dict[str, Any]:
        x = torch.randn(size * size * 4, device=GPU)
        y = torch.empty_like(x)
        return {"tb_s": 2 * x.nbytes / seconds(lambda: y.copy_(x)) / 1e12}

    def fp8() -> dict[str, Any]:
        a, b = (draw(size, size).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=GPU)
        return {
            name: 2 * size**3 / 1e12
            / seconds(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=BF16, use_fast_accum=fast))
            for name, fast in (("tflops", False), ("tflops_fast_sums", True))
        }  # fmt: skip

    def layer(k: int, m: int) -> dict[str, Any]:
        x, w, g = draw(tokens, k), draw(m, k), draw(tokens, m)
        total, work = torch.zeros(m, k, device=GPU), 2 * tokens * k * m / 1e12
        return {
            "forward": work / seconds(lambda: F.linear(x, w)),
            "input_gradient": work / seconds(lambda: g @ w),
            "weight_gradient": work / seconds(lambda: g.t() @ x),
            "added_after": work / seconds(lambda: total.add_(g.t() @ x)),
        }

    def added_by_matmul(k: int, m: int) -> dict[str, Any]:
        x, g, total = draw(tokens, k), draw(tokens, m), torch.zeros(m, k, device=GPU)
        took = seconds(lambda: torch.addmm(total, g.t(), x, torch.float32, out=total))
        return {"weight_gradient": 2 * tokens * k * m / 1e12 / took}

    results.attempt("rates", {"what": f"matmul {size}"}, products)
    results.attempt("rates", {"what": "copy"}, copies)
    results.attempt("rates", {"what": f"fp8 matmul {size}"}, fp8)
    shrink = 64 if small else 1
    for name, k, m in SHAPES:
        results.attempt("rates", {"what": name}, partial(layer, k // shrink, m // shrink))
        results.attempt(
            "rates", {"what": f"{name}, added by the matmul"}, partial(added_by_matmul, k // shrink, m // shrink)
        )


def attention(small: bool) -> None:
    """Each backend at the sizes of a layer, causal."""
    for name, s, b, n, g, d in ATTENTION:
        s, b, n, g = (32, 1, 4, 2) if small else (s, b, n, g)
        # As layers lay them out: views of one product.
        q, k, v = draw(s, b, n + 2 * g, d).split([n, g, g], 2)
        heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]

        def choice(heads: list[Tensor] = heads, repeats: bool = n != g) -> dict[str, Any]:
            q, k, v = heads
            number = int(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=repeats))
            return {"chosen": BACKENDS.get(number, number)}

        def measure(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
            attend = lambda *given: call(*given, AttentionMaskSpec(), 0.0)
            work = 2 * s * s * n * d * b / 1e12
            began = time.perf_counter()
            both = both_passes(attend, q, k, v)
            both()
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            with torch.no_grad():
                forward = seconds(lambda: attend(q, k, v))
            backward = seconds(both) - forward
            return {"forward": work / forward, "backward": 2.5 * work / max(backward, 1e-9), "first_call_s": first}

        results.attempt("attention", {"what": name, "kernel": "torch chooses"}, choice)
        need = KernelRequirements(device="cuda", dtype=BF16, head_sizes=(d, d))
        for one in CANDIDATES:
            if one.op != "attention" or one.name in ("local", "unfused"):
                continue
            if reason := one.unsupported_reason(need):
                results.add("attention", what=name, kernel=one.name, unsupported_reason=reason[:80])
            elif (call := one.loaded_kernel) is not None:
                results.attempt("attention", {"what": name, "kernel": one.name}, partial(measure, call, q, k, v))


def masks(small: bool) -> None:
    """What a run takes unasked, beside FlexAttention; then rows without a visible key, whose gradients must be numbers."""
    s, b, n, g, d = (64, 1, 4, 2, 64) if small else (4096, 2, 32, 8, 128)
    q, k, v = draw(s, b, n, d), draw(s, b, g, d), draw(s, b, g, d)
    documents = (torch.arange(s, device=GPU)[None].expand(b, -1) // (s // 5)).contiguous()
    for name, mask, scores in (
        ("documents", AttentionMaskSpec(documents=documents), AttentionScoreModifiers()),
        ("window", AttentionMaskSpec(window=(min(512, s // 4), 0)), AttentionScoreModifiers()),
        ("cap 50", AttentionMaskSpec(), AttentionScoreModifiers(softcap=50.0)),
        ("sinks", AttentionMaskSpec(), AttentionScoreModifiers(sink=draw(n))),
    ):

        def measure(
            call: Callable[..., Tensor], mask: AttentionMaskSpec = mask, scores: AttentionScoreModifiers = scores
        ) -> dict[str, Any]:
            torch.cuda.reset_peak_memory_stats()
            held, began = torch.cuda.memory_allocated(), time.perf_counter()
            both = both_passes(lambda *given: call(*given, mask, 0.0, scores), q, k, v)
            both()
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            peak = (torch.cuda.max_memory_allocated() - held) / 1e9
            return {"ms": 1e3 * seconds(both, 3, 3), "peak_gb": peak, "first_call_s": first}

        for kernel, call in (("fused", fused.attention_by_sdpa), ("flex", flex.attention_by_flex)):
            results.attempt("masks", {"what": name, "kernel": kernel}, partial(measure, call))
    blind_rows()


def blind_rows() -> None:
    """Masks under which some queries see no key."""
    s = 300
    q, k, v = draw(s, 2, 8, 64), draw(s, 2, 2, 64), draw(s, 2, 2, 64)
    nothing = torch.zeros(2, s, dtype=torch.bool, device=GPU)
    for name, mask in (
        ("a band whose last block is padded", AttentionMaskSpec(window=(37, 0))),
        ("a band of documents", AttentionMaskSpec(window=(37, 0), documents=torch.arange(s, device=GPU)[None].expand(2, -1) // 99)),
        ("no key at all", AttentionMaskSpec(causal=False, padding=nothing)),
    ):  # fmt: skip

        def measure(mask: AttentionMaskSpec = mask) -> dict[str, Any]:
            attend: Callable[..., Tensor] = fused.attention_by_sdpa
            gradients = both_passes(lambda *given: attend(*given, mask), q, k, v)()
            output = fused.attention_by_sdpa(q, k, v, mask)
            exact = reference.softmax_attention(q.float(), k.float(), v.float(), mask)
            finite = all(bool(one.isfinite().all()) for one in (output, *gradients))
            if not finite:
                raise ArithmeticError("NaN in the output or in a gradient")
            return {"error": float((output.float() - exact).norm() / exact.norm().clamp(min=1e-9))}

        results.attempt("masks", {"what": name}, measure)


def plans(small: bool) -> None:
    """What one call costs whose shape is new: a decoding step has a key more each time, prompts are of any length."""
    b, n, d = (2, 4, 64) if small else (32, 32, 128)
    shapes = {
        "decoding, a key more each time": lambda i: (b, 1, 500 + i),
        "prompts of new lengths": lambda i: (1, 300 + 7 * i, 300 + 7 * i),
        "prompts, lengths rounded to 64": lambda i: (1, 64 * (i // 4 + 5), 64 * (i // 4 + 5)),
    }
    for cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for name, shape in shapes.items():

            def measure(shape: Callable[[int], tuple[int, int, int]] = shape) -> dict[str, Any]:
                times = []
                for i in range(8):
                    rows, queries, keys = shape(i)
                    q, k, v = (draw(rows, n, length, d) for length in (queries, keys, keys))
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    with torch.no_grad():
                        F.scaled_dot_product_attention(q, k, v, is_causal=queries == keys)
                    torch.cuda.synchronize()
                    times.append(round(1e3 * (time.perf_counter() - began), 2))
                return {"ms_each": times}

            results.attempt("plans", {"what": name, "cudnn": cudnn}, measure)
    torch.backends.cuda.enable_cudnn_sdp(True)


def optimizer(small: bool) -> None:
    """An update of GPT 1.3B."""

    def measure() -> dict[str, Any]:
        trainer = trainer_of({**GPT, "num_layers": 2 if small else 24, "micro_batch_size": 1}, small=small)
        for parallel in trainer.parallels:
            parallel.zero_gradients()
            for bucket in getattr(parallel, "buckets"):  # noqa: B009 - not FSDP's
                bucket.grad.normal_()
        trainer.optimizer.set_rates(1e-4, 0.1, None)
        result = timed(lambda: trainer.optimizer.step(), GPU, calls=3, rounds=3)
        parameters = sum(one.numel() for stage in trainer.stages for one in stage.parameters())
        return {
            "parameters": parameters,
            "ms": 1e3 * result.device,
            "host_ms": 1e3 * result.host,
            "bytes_a_parameter_at_3_tb_s": result.device * 3e12 / parameters,
        }

    results.attempt("optimizer", {"what": "AdamW"}, measure)


def nccl(small: bool) -> None:
    """One rank: NCCL takes the calls."""
    device = torch.device("cuda", torch.cuda.current_device())  # NCCL wants its number
    dist.init_process_group(
        "nccl",
        init_method="tcp://127.0.0.1:29511",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        device_id=device if torch.version.cuda else None,
    )
    x = draw(1 << (10 if small else 20), dtype=torch.float32)
    average = dist.ReduceOp.AVG
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce, averaged": lambda: dist.all_reduce(x, op=average, async_op=True).wait(),
        "all_gather in place": lambda: dist.all_gather_into_tensor(x, x, async_op=True).wait(),
        "reduce_scatter in place": lambda: dist.reduce_scatter_tensor(x, x, op=average, async_op=True).wait(),
        "all_to_all": lambda: dist.all_to_all_single(
            torch.empty_like(x), x, [len(x)], [len(x)], async_op=True
        ).wait(),
        "bytes": lambda: dist.all_gather_into_tensor(x.view(torch.uint8), x.view(torch.uint8)),
        "barrier": dist.barrier,
    }  # fmt: skip
    for name, call in calls.items():
        results.attempt("nccl", {"what": name}, partial(milliseconds, call))

    def captured() -> dict[str, Any]:
        again, y = CudaGraphPool(GPU).capture(lambda: x * 2)
        again()
        torch.cuda.synchronize()
        return {"right": bool(torch.equal(y, x * 2))}

    results.attempt("nccl", {"what": "a graph captured beside NCCL's watchdog"}, captured)
    dist.destroy_process_group()


SECTIONS: dict[str, Callable[[bool], None]] = {
    "rates": rates,
    "attention": attention,
    "masks": masks,
    "plans": plans,
    "optimizer": optimizer,
    "nccl": nccl,
}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*SECTIONS, []], metavar="SECTION")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("it needs a GPU, or the stand-in: bash tests/without_gpu/run.sh benchmarks/gpu/pieces.py --small")
    for name in options.names or SECTIONS:
        SECTIONS[name](options.small)
    results.end()


if __name__ == "__main__":
    main()
