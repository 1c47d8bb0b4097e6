"""Rates, sizes and latencies of machines, as data; cost.py computes seconds from them.

A profile has two kinds of numbers: the maker's (peak rates, memory, links), and the shares of them that kernels reach, which a profile
made by `megatron plan --measure` replaces by measured ones. The built-in shares are those of Hopper:

    matmul       by the FLOPs of one product. 0.80 of the peak at 8192^3 was measured on an H200 (790 of 989 TFLOP/s; power is the
                 limit); 0.60 at the products of a 1.3B model (6.9e10 FLOPs, hidden size 2048) is what published steps imply;
                 smaller ones do not fill the device
    attention    share of the matmul peak: published forward and backward rates of FlashAttention 2 and 3 are around 0.45 and 0.35
                 of the peak for heads of 128 and 4,096 tokens, counted causally
    memory       of the bandwidth: a copy on the same H200 moved 4.3 of 4.8 TB/s
    network      of a link: NCCL's large all-reduce reaches about 0.8

Peaks are dense, in FLOPs per second. Links are one way, in bytes per second of one rank. Latencies are in seconds. Capacities are what the
driver reports as total memory. Sources: the makers' data sheets of A100, H100, H200, HGX B200, GB200 NVL72 and MI300X.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.plan.units import GIB


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A connection between ranks. rate: bytes per second of one rank, one way, as reached. latency: seconds per step of a message."""

    rate: float
    latency: float

    def transfer_seconds(self, moved: float) -> float:
        """Return the seconds of one message of so many bytes."""
        return self.latency + moved / self.rate


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of machine.

    peak: FLOPs per second by dtype. matmul: (FLOPs of one product, share of the peak), ascending. attention: shares of the peak in forward and
    backward passes. memory: bytes; usable: the share available to tensors (the rest goes to the driver, to collectives and to fragmentation).
    memory_rate: bytes per second, as reached. launch: seconds of a small operation. node: number of ranks that `inside` connects;
    `network` connects the nodes. sleep: seconds by which a timed pause is late, on measured machines. fused: attention has fused kernels for dropout and
    masks, too.
    """

    name: str
    peak: Mapping[str, float]
    matmul: tuple[tuple[float, float], ...]
    attention: tuple[float, float]
    memory: float
    memory_rate: float
    launch: float
    node: int
    inside: NetworkLink
    network: NetworkLink
    usable: float = 0.94
    sleep: float = 0.0
    fused: bool = True
    source: str = ""

    def peak_flops(self, dtype: str) -> float:
        """Return the peak FLOPs per second of a dtype; that of fp32 where the profile does not name it."""
        return self.peak.get(dtype, self.peak["float32"])

    def matmul_seconds(self, flops: float, dtype: str) -> float:
        """Return the seconds of one matrix product."""
        return flops / (self.peak_flops(dtype) * interpolate_share(self.matmul, flops)) if flops else 0.0

    def attention_seconds(self, flops: float, dtype: str, *, backward: bool) -> float:
        """Return the seconds of one attention kernel. flops: of the keys that are attended to."""
        return flops / (self.peak_flops(dtype) * self.attention[backward])

    def usable_bytes(self) -> float:
        """Bytes available to tensors."""
        return self.memory * self.usable

    def slowest_link(self, ranks: Sequence[int]) -> NetworkLink:
        """Return the slowest link of a ring over these ranks. Each rank has a port to the network, and the ring uses all of a node's ports."""
        nodes = [rank // self.node for rank in ranks]
        if len(set(nodes)) < 2:
            return self.inside
        together = min(nodes.count(node) for node in set(nodes))
        return NetworkLink(min(self.inside.rate, together * self.network.rate), self.network.latency)


def interpolate_share(points: Sequence[tuple[float, float]], size: float) -> float:
    """Interpolate a share linearly over the logarithm of the size; outside of the table, the end values."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in zip(points, points[1:]):
        if size <= high:
            place = math.log(size / low) / math.log(high / low)
            return first + place * (second - first)
    return points[-1][1]


def collective_seconds(name: str, moved: float, ranks: Sequence[int], hardware: Hardware) -> float:
    """Return the seconds of one collective. moved: bytes of the larger tensor; of an all-to-all, of what a rank sends.

    Rings move 2 (n-1)/n of it for an all-reduce and (n-1)/n for an all-gather or reduce-scatter. A tree takes 2 log2 n latency steps
    instead of 2 (n-1); the faster one is used, as in NCCL. In an all-to-all every rank sends n-1 of its n parts, those for other nodes
    through its own port. (Thakur, Rabenseifner, Gropp, 2005.)
    """
    n = len(ranks)
    if n < 2:
        return 0.0
    link, steps = hardware.slowest_link(ranks), math.ceil(math.log2(n))
    if name in ("all_reduce", "barrier"):
        ring = 2 * (n - 1) * link.latency + 2 * (n - 1) / n * moved / link.rate
        return min(ring, 2 * steps * link.latency + 2 * moved / link.rate)
    if name in ("all_gather", "reduce_scatter"):
        return (n - 1) * link.latency + (n - 1) / n * moved / link.rate
    if name == "all_to_all":
        node = ranks[0] // hardware.node
        near = sum(rank // hardware.node == node for rank in ranks) - 1
        apart = (n - 1 - near) / n * moved / hardware.network.rate
        return steps * link.latency + max(near / n * moved / hardware.inside.rate, apart)
    return steps * link.latency + moved / link.rate  # one rank's tensor to all, or all to one


Reached = tuple[tuple[tuple[float, float], ...], tuple[float, float]]  # shares: `matmul` and `attention` of a profile
AMPERE: Reached = ((1e8, 0.05), (1e9, 0.25), (1e10, 0.60), (7e10, 0.78), (3e11, 0.82), (1.1e12, 0.85)), (0.60, 0.50)
HOPPER: Reached = ((1e8, 0.02), (1e9, 0.10), (1e10, 0.38), (7e10, 0.60), (3e11, 0.70), (1.1e12, 0.80)), (0.45, 0.35)
BLACKWELL: Reached = ((1e8, 0.01), (1e9, 0.06), (1e10, 0.28), (7e10, 0.52), (3e11, 0.66), (1.1e12, 0.75)), (0.45, 0.35)
CDNA: Reached = ((1e8, 0.01), (1e9, 0.06), (1e10, 0.25), (7e10, 0.40), (3e11, 0.46), (1.1e12, 0.50)), (0.30, 0.22)


# name; TFLOP/s of bf16, tf32, fp32, fp64 and, where the hardware has them, of 8- and 4-bit formats; MiB of memory; TB/s of
# memory; bytes per second of a link and of a port to the network, one way; ranks of a node; shares. fp32 products run on the
# vector units, as torch does by default; tf32 is a dtype of its own here.
_ACCELERATORS = (
    ("a100-40", (312, 156, 19.5, 9.7), 40_536, 1.555, 300e9, 25e9, 8, AMPERE),
    ("a100-80", (312, 156, 19.5, 9.7), 81_251, 2.039, 300e9, 25e9, 8, AMPERE),
    ("h100-80", (989.4, 494.7, 67, 34, 1979), 81_559, 3.35, 450e9, 50e9, 8, HOPPER),
    ("h200", (989.4, 494.7, 67, 34, 1979), 143_771, 4.8, 450e9, 50e9, 8, HOPPER),
    ("b200", (2250, 1125, 75, 37, 4500, 9000), 183_359, 7.7, 900e9, 50e9, 8, BLACKWELL),
    ("gb200", (2500, 1250, 80, 40, 5000, 10000), 189_471, 8.0, 900e9, 50e9, 72, BLACKWELL),
    ("mi300x", (1307.4, 653.7, 163.4, 163.4, 2614.9), 196_592, 5.3, 448e9, 50e9, 8, CDNA),
)
PROFILES: Mapping[str, Hardware] = {
    name: Hardware(
        name,
        {
            dtype: rate * 1e12
            for dtype, rate in zip(
                ("bfloat16", "float16", "tf32", "float32", "float64", "float8", "float4"), (teraflops[0], *teraflops)
            )
        },
        *reached,
        mebibytes * 2.0**20,
        0.9 * terabytes * 1e12,
        4e-6,
        node,
        NetworkLink(0.8 * link, 3e-6),
        NetworkLink(0.8 * port, 12e-6),
        source="maker's data sheet, published shares",
    )
    for name, teraflops, mebibytes, terabytes, link, port, node, reached in _ACCELERATORS
} | {
    # Two cores of a server in 2021, and ranks that share its memory: 121 to 144 GFLOP/s and 20 GB/s were measured.
    "cpu": Hardware(
        "cpu",
        {"float32": 1.3e11, "float64": 6.5e10, "bfloat16": 3e10, "float16": 3e10},
        ((1e5, 0.1), (1e7, 0.5), (1e9, 1.0)),
        (0.6, 0.5),
        16.0 * GIB,
        2e10,
        5e-6,
        64,
        NetworkLink(1e9, 1e-4),
        NetworkLink(1e8, 3e-4),
        usable=0.8,
        fused=False,
        source="measured on two cores of a Zen 3 server",
    )
}


def hardware_of(name: str) -> Hardware:
    """Return a built-in profile, or read one from a JSON file of `--measure`. `ConfigError` if it is neither."""
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"--gpu or --hardware {name} is neither a profile ({', '.join(PROFILES)}) nor a file; choose one of these, or make "
            "a file on the machine with: megatron plan --measure FILE"
        )
    try:
        return hardware_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--hardware {name} is not a profile: {type(error).__name__}: {error}; make one with: megatron plan "
            "--measure FILE"
        ) from error


def hardware_from_json(values: Mapping[str, Any]) -> Hardware:
    """Return the profile of these values, which `dataclasses.asdict` wrote. Raises `ValueError` for invalid ones."""
    known = {field.name for field in fields(Hardware)}
    if odd := sorted(values.keys() ^ known):
        raise ValueError(f"it has to have {', '.join(sorted(known))}; these differ: {', '.join(odd)}")
    hardware = Hardware(
        **{
            **values,
            "peak": {name: float(rate) for name, rate in values["peak"].items()},
            "matmul": tuple((float(size), float(share)) for size, share in values["matmul"]),
            "attention": (float(values["attention"][0]), float(values["attention"][1])),
            "inside": NetworkLink(**values["inside"]),
            "network": NetworkLink(**values["network"]),
        }
    )
    rates = (
        *hardware.peak.values(),
        hardware.memory,
        hardware.memory_rate,
        hardware.node,
        hardware.inside.rate,
        hardware.network.rate,
        hardware.usable,
        *hardware.attention,
        *(number for point in hardware.matmul for number in point),
    )
    if "float32" not in hardware.peak or min(rates) <= 0 or list(hardware.matmul) != sorted(hardware.matmul):
        raise ValueError("rates, sizes and shares must be above 0, the peaks must have float32, and matmul must rise")
    return hardware
