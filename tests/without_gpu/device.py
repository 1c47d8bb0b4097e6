"""What Python says of a GPU, over `device.cpp`: torch.cuda, attention and low-precision matmuls, as a Hopper or Blackwell has them.

Streams and events are those of a device that does everything at once. Attention and products in 8 and 4 bits are formulas;
before a product, torch's own checks of shapes and layouts are made, those for GPUs.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import gpu_stand_in as device
import torch
import torch._meta_registrations as checks
import torch.cuda
import torch.nn.functional as F
from torch import Tensor

CAPABILITY = tuple(int(part) for part in os.environ.get("MEGATRON_STAND_IN", "9.0").split("."))
MEMORY = 140 * 2**30


class Stream:
    """A queue of work that is always empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        """Nothing is under way."""

    def wait_event(self, event: Event) -> None:
        """It has come."""

    def record_event(self, event: Event | None = None) -> Event:
        """A moment of this queue: now."""
        event = event or Event()
        event.record()
        return event


class Event:
    """A moment."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Now."""
        self.time = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from here to there."""
        return 1000.0 * (other.time - self.time)

    def synchronize(self) -> None:
        """It has come, but a GPU's host would have waited."""
        device.wait_for("an event is waited for")


class Within:
    """`with torch.cuda.stream(...)`."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


class Graph:
    """Operations that can be repeated."""

    def __init__(self) -> None:
        self.steps = 0

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """What is done from here on is recorded."""
        record_launches()
        device.record()

    def capture_end(self) -> None:
        """No more is recorded."""
        self.steps = device.end()

    def replay(self) -> None:
        """Do it again."""
        device.replay(self.steps)

    def pool(self) -> tuple[int, int]:
        """Where its memory comes from."""
        return 0, 1

    def __del__(self) -> None:
        if self.steps:
            device.forget(self.steps)


def record_launches() -> None:
    """Kernels of Triton that are interpreted are recorded, too, if there are any."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter.GridExecutor, "launch"):
        return
    executor = interpreter.GridExecutor
    executor.launch = executor.__call__

    def call(self: Any, *given: Any, **named: Any) -> None:
        if device.is_recording():
            device.do_and_record(lambda: executor.launch(self, *given, **named))
        else:
            executor.launch(self, *given, **named)

    executor.__call__ = call


class Recording:
    """`with torch.cuda.graph(...)`."""

    def __init__(self, graph: Graph, **_: Any) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        self.graph.capture_begin()

    def __exit__(self, *raised: object) -> None:
        self.graph.capture_end()


def quiet(formula: Callable) -> Callable:
    """The same formula, of whose reads no GPU knows: they are no waits."""

    @functools.wraps(formula)
    def call(*given: Any, **named: Any) -> Any:
        device.be_quiet(1)
        try:
            return formula(*given, **named)
        finally:
            device.be_quiet(-1)

    return call


def statistics(_: Any = None) -> dict[str, int]:
    """torch.cuda.memory_stats."""
    held, peak, count = device.held()
    return {
        "allocated_bytes.all.current": held,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": held,
        "reserved_bytes.all.peak": peak,
        "allocation.all.current": count,
    }


def install() -> None:
    """Let torch.cuda speak of the device."""
    numbers, stream = device.generator(), Stream()
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": lambda _=None: device.wait_for("synchronize"),
        "set_sync_debug_mode": lambda mode: device.refuse_waits({"default": 0, "warn": 1, "error": 2}.get(mode, mode)),
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: "stand-in for a GPU",
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="stand-in for a GPU",
            major=CAPABILITY[0],
            minor=CAPABILITY[1],
            total_memory=MEMORY,
            multi_processor_count=132,
        ),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "Stream": Stream,
        "Event": Event,
        "stream": Within,
        "StreamContext": Within,
        "CUDAGraph": Graph,
        "is_current_stream_capturing": device.is_recording,
        "graph": Recording,
        "memory_stats": statistics,
        "memory_allocated": lambda _=None: device.held()[0],
        "max_memory_allocated": lambda _=None: device.held()[1],
        "reset_peak_memory_stats": lambda _=None: device.forget_peak(),
        "mem_get_info": lambda _=None: (MEMORY - device.held()[0], MEMORY),
        "empty_cache": lambda: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "default_generators": (numbers,),
        "get_rng_state": lambda _=None: numbers.get_state(),
        "set_rng_state": lambda state, _=None: numbers.set_state(state),
        "manual_seed": numbers.manual_seed,
        "manual_seed_all": numbers.manual_seed,
        "is_bf16_supported": lambda _=True: True,
    }.items():
        setattr(torch.cuda, name, value)
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    if find_spec("torch.nn.attention.varlen") is not None:
        library, model = import_module("torch.nn.attention.varlen"), import_module("varlen_stand_in").varlen_attn
        setattr(library, "varlen_attn", functools.wraps(library.varlen_attn)(model))  # noqa: B010 - torch's own is for a GPU alone
    torch.compile = lambda function=None, **_: function if function is not None else (lambda one: one)  # type: ignore[assignment]
    on_cpu = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return on_cpu(self, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(self), size)
        return self

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    F.scaled_dot_product_attention = (
        attention  # torch itself looks for its kernels in a table that knows real devices only
    )
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        interpreter = import_module("triton.runtime.interpreter")  # which copies what a kernel gets to the CPU and back
        interpreter.GridExecutor.__call__ = quiet(interpreter.GridExecutor.__call__)
    for name, kernel in KERNELS.items():
        LIBRARY.impl(name, quiet(kernel), "CUDA")


# Attention. q: [b, n, queries, d]; k, v: [b, g, keys, d].


@dataclass(frozen=True)
class How:
    """bias: added to the scores, or which of them count; rate: of dropout."""

    bias: Tensor | None
    rate: float
    causal: bool
    scale: float | None


def scores(q: Tensor, k: Tensor, how: How) -> Tensor:
    """What the softmax is taken of, [b, n, queries, keys]."""
    found = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if how.scale is None else how.scale)
    if how.bias is not None:
        found = found.masked_fill(~how.bias, -math.inf) if how.bias.dtype == torch.bool else found + how.bias.float()
    if how.causal:
        found = found.masked_fill(
            torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril().logical_not(), -math.inf
        )
    return found


def kept(shares: Tensor, rate: float, seed: Tensor) -> Tensor | float:
    """What dropout multiplies by."""
    if not rate:
        return 1.0
    generator = torch.Generator(shares.device).manual_seed(int(seed.cpu()))
    return (torch.rand(shares.shape, generator=generator, device=shares.device) >= rate) / (1 - rate)


def near(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same bytes for a formula, whose own tensors no GPU would hold; a graph records what is done on the device."""
    return [one if one is None or device.is_recording() else device.here(one) for one in tensors]


def attend(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor]:
    """(output, logarithms of the sums, seed)."""
    seed = torch.randint(0, 2**31, (1,), device="cuda") if how.rate else torch.zeros(1, dtype=torch.long, device="cuda")
    output = torch.empty_like(
        q[..., :1].expand(*q.shape[:-1], v.shape[-1]) if q.shape[-1] != v.shape[-1] else q
    )  # laid as the queries are
    q, k, v, bias = near(q, k, v, how.bias)
    how = replace(how, bias=bias)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    found = scores(q, k, how)
    sums = found.logsumexp(-1)
    shares = (found - sums[..., None]).exp().nan_to_num(0.0)
    output.copy_((shares * kept(shares, how.rate, seed)) @ v.float())
    return output, sums.to("cuda"), seed


def gradients(
    gradient: Tensor, inputs: Sequence[Tensor], sums: Tensor, seed: Tensor, how: How
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of q, k, v and the bias."""
    gradient, q, k, v, sums, bias = near(gradient, *inputs, sums, how.bias)
    how = replace(how, bias=bias)
    batch, groups, keys, _ = k.shape
    all_k, all_v = (x.repeat_interleave(q.shape[1] // groups, 1).float() for x in (k, v))
    shares = (scores(q, all_k, how) - sums[..., None]).exp().nan_to_num(0.0)
    factor = kept(shares, how.rate, seed)
    of_v = (shares * factor).transpose(-1, -2) @ gradient.float()
    of_shares = (gradient.float() @ all_v.transpose(-1, -2)) * factor
    of_bias = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True))
    of_scores = of_bias * (q.shape[-1] ** -0.5 if how.scale is None else how.scale)
    of_k = of_scores.transpose(-1, -2) @ q.float()
    of_k, of_v = (x.view(batch, groups, -1, keys, x.shape[-1]).sum(2) for x in (of_k, of_v))
    of_bias = None if bias is None else of_bias.sum_to_size(bias.shape).to("cuda", bias.dtype)
    return (of_scores @ all_k).to("cuda", q.dtype), of_k.to("cuda", k.dtype), of_v.to("cuda", v.dtype), of_bias


def choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> str:
    """The first of torch's kernels on a Hopper that is allowed and takes these inputs."""
    half, in_lines = q.dtype in (torch.float16, torch.bfloat16), all(x.stride(-1) == 1 for x in (q, k, v))
    allowed = torch.backends.cuda
    if (
        allowed.cudnn_sdp_enabled()
        and half
        and in_lines
        and mask is None
        and not gqa
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
    ):
        return "cudnn"
    if allowed.flash_sdp_enabled() and half and in_lines and mask is None and q.shape[-1] == v.shape[-1] <= 256:
        return "flash"
    if allowed.mem_efficient_sdp_enabled() and in_lines and not gqa and q.dtype != torch.float64:
        return "efficient"
    if not allowed.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return "math"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention."""
    kernel = choose(q, k, v, attn_mask, others.get("enable_gqa", False)) if q.is_cuda else "math"
    rest, scale = (dropout_p, is_causal), {"scale": others.get("scale")}
    if attn_mask is not None and attn_mask.dtype == torch.bool and kernel == "efficient":
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -math.inf)
    if kernel == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, *rest, **scale)[0]
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, *rest, **scale)[0]
    if kernel == "efficient":
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, q.requires_grad, *rest, **scale
        )[0]
    return _plain_attention(q, k, v, attn_mask, *rest, **others)


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.long, device="cuda")


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """aten::_scaled_dot_product_flash_attention."""
    output, sums, seed = attend(q, k, v, How(None, rate, causal, scale))
    return output, sums, None, None, q.shape[2], k.shape[2], seed, _nothing(), torch.empty(0, device="cuda")


def flash_backward(gradient: Tensor, *given: Any, scale: float | None = None) -> tuple:
    """aten::_scaled_dot_product_flash_attention_backward."""
    *inputs, _, sums, _, _, _, _, rate, causal, seed, _ = given
    return gradients(gradient, inputs, sums, seed, How(None, rate, causal, scale))[:3]


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keeps: bool,
    rate: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """aten::_scaled_dot_product_efficient_attention."""
    return *attend(q, k, v, How(bias, rate, causal, scale)), _nothing()


def efficient_backward(gradient: Tensor, *given: Any, scale: float | None = None) -> tuple:
    """aten::_scaled_dot_product_efficient_attention_backward."""
    q, k, v, bias, _, sums, seed, _, rate, wanted, *causal = given
    *found, of_bias = gradients(gradient, (q, k, v), sums, seed, How(bias, rate, bool(causal and causal[0]), scale))
    return *found, of_bias if wanted[3] else None


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keeps: bool, *given: Any, scale: float | None = None
) -> tuple:
    """aten::_scaled_dot_product_cudnn_attention."""
    rate, causal, _ = (*given, *(0.0, False, False)[len(given) :])
    output, sums, seed = attend(q, k, v, How(bias, rate, causal, scale))
    return output, sums, None, None, q.shape[2], k.shape[2], seed, _nothing(), torch.empty(0, device="cuda")


def cudnn_backward(gradient: Tensor, *given: Any, scale: float | None = None) -> tuple:
    """aten::_scaled_dot_product_cudnn_attention_backward."""
    *inputs, _, sums, seed, _, bias, _, _, _, _, rate, causal = given
    return gradients(gradient, inputs, sums, seed, How(bias, rate, causal, scale))[:3]


# Products in 8 and 4 bits, and of groups of rows.


def scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *given: Any,
    out_dtype: torch.dtype | None = None,
    **named: Any,
) -> Tensor:
    """aten::_scaled_mm, with one scale a tensor."""
    dtype = given[2] if len(given) > 2 else out_dtype
    checks.meta_scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, **named)
    assert scale_a.numel() == scale_b.numel() == 1 and CAPABILITY >= (8, 9)
    a, b, scale_a, scale_b = near(a, b, scale_a, scale_b)
    return ((a.float() @ b.float()) * (scale_a * scale_b)).to("cuda", dtype)


def scaled_by_blocks(a: Tensor, b: Tensor, *given: Any) -> Tensor:
    """aten::_scaled_mm_v2."""
    scale_a, kinds_a, order_a, scale_b, kinds_b, order_b, bias, dtype, *others = given
    kinds = [[F.ScalingType(int(kind)) for kind in one] for one in (kinds_a, kinds_b)]
    orders = [[F.SwizzleType(int(order)) for order in one] for one in (order_a, order_b)]
    of_hopper = kinds[0][0] in (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert CAPABILITY[0] == 9 if of_hopper else CAPABILITY[0] >= 10
    checks.meta_scaled_mm_v2(a, b, scale_a, kinds[0], orders[0], scale_b, kinds[1], orders[1], bias, dtype, *others)
    (a, *scale_a), (b, *scale_b) = near(a, *scale_a), near(b, *scale_b)
    found = (
        but_for_the_scale_of_all(a, scale_a[0], kinds[0][0])
        @ but_for_the_scale_of_all(b.t(), scale_b[0], kinds[1][0]).t()
    )
    if len(scale_a) > 1:
        found = found * (scale_a[1] * scale_b[1])  # after the sum, as on a GPU
    return found.to("cuda", dtype)


def widened(
    total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """aten::addmm.dtype_out: a product of half precision, added to fp32."""
    assert (
        {a.dtype, b.dtype} <= {torch.float16, torch.bfloat16}
        and a.dtype == b.dtype
        and dtype == total.dtype == out.dtype == torch.float32
    )
    own, sums, a, b = near(out, total, a, b)
    own.copy_(beta * sums + alpha * (a.float() @ b.float()))
    return out


def but_for_the_scale_of_all(x: Tensor, scales: Tensor, kind: Any) -> Tensor:
    """The matrix [m, k] in fp32, with the scales of its blocks."""
    kinds, rows = F.ScalingType, x.shape[0]
    if kind == kinds.BlockWise1x128:
        return x.float() * scales.repeat_interleave(128, 1)
    if kind == kinds.BlockWise128x128:
        return x.float() * scales.t()[:, : x.shape[1] // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    if kind == kinds.BlockWise1x32:
        return x.float() * from_tiles(scales, rows, -(-x.shape[1] // 32)).repeat_interleave(32, 1)[:, : x.shape[1]]
    assert kind == kinds.BlockWise1x16
    numbers = torch.tensor([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], device=x.device)
    held = x.view(torch.uint8)
    values = numbers[torch.stack((held & 15, held >> 4), -1).flatten(1).long()]
    return values * from_tiles(scales, rows, values.shape[1] // 16).repeat_interleave(16, 1)


def from_tiles(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [rows, columns] that lie in tiles of 128 x 4, in which rows 32 apart are neighbours."""
    high, wide = -(-rows // 128), -(-columns // 4)
    return (
        scales.reshape(-1)
        .float()
        .view(high, wide, 32, 4, 4)
        .permute(0, 3, 2, 1, 4)
        .reshape(128 * high, 4 * wide)[:rows, :columns]
    )


def grouped(a: Tensor, b: Tensor, ends: Tensor, bias: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    """aten::_grouped_mm."""
    checks.meta_grouped_mm(a, b, ends, bias, dtype)
    last = ends.cpu().tolist()
    pairs = list(zip([0, *last[:-1]], last, strict=True))
    if b.dim() == 2:
        return torch.stack([a[:, low:high] @ b[low:high] for low, high in pairs])
    output = torch.full((a.shape[0], b.shape[2]), math.nan, dtype=dtype or a.dtype, device=a.device)
    for group, (low, high) in enumerate(pairs):
        output[low:high] = a[low:high] @ b[group]
    return output


_plain_attention = F.scaled_dot_product_attention
LIBRARY = torch.library.Library("aten", "IMPL")
KERNELS = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_mm": scaled,
    "_scaled_mm_v2": scaled_by_blocks,
    "_grouped_mm": grouped,
    "addmm.dtype_out": widened,
}
