"""Measure this machine: a profile for hardware.py.

    one process        matrix products by size and dtype, a copy, attention, the launch of a small operation, how late a pause ends
    under torchrun     all-reduces over 2, 4, ... ranks as well: latency and bandwidth of links within a node and between nodes

Every figure is the best of a few rounds: what the machine can do undisturbed. Rates of links come from two all-reduces, a tiny and a large
one, by the formula that cost.py uses: t = 2 (n-1) latency + 2 (n-1)/n bytes / rate.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.parallel.device import pick_device, process_group_backend, set_current_device, synchronize
from megatron.plan.hardware import PROFILES, Hardware, NetworkLink
from megatron.training.launch.launch_info import read_launch_info

Say = Callable[[str], None]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = {"cpu": (16, 64, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
COPIED = {"cpu": 2**25, "cuda": 2**28}  # numbers of fp32
ROUNDS, LEAST_SECONDS = 5, 0.002
SMALL, LARGE = 8, 2**23  # numbers of fp32 in the two sums


def measure_hardware(say: Say) -> Hardware | None:
    """Measure this machine; return its profile, or None on all ranks but the first. say: called with lines of progress."""
    place, device = read_launch_info(), pick_device()
    set_current_device(device)
    if place.size == 1:
        say("links are those of a built-in profile; run this under torchrun to measure them")
        return _measure_device_rates(device, say)
    is_first = place.rank == 0
    # The others wait, so as not to disturb.
    hardware = _measure_device_rates(device, say) if is_first else PROFILES["cpu"]
    dist.init_process_group(process_group_backend(device), device_id=device if device.type == "cuda" else None)
    try:
        hardware = measure_links(hardware, device, say if is_first else lambda line: None)
    finally:
        dist.destroy_process_group()
    return hardware if is_first else None


def _measure_device_rates(device: torch.device, say: Say) -> Hardware:
    """Measure what one process can; links are those of a built-in profile."""
    base = PROFILES["cpu" if device.type == "cpu" else "h200"]
    sizes = SIZES["cpu" if device.type == "cpu" else "cuda"]
    rates = {
        name: [(2.0 * size**3, _measure_matmul_rate(size, dtype, device)) for size in sizes]
        for name, dtype in DTYPES.items()
    }
    peak = {name: max(rate for _, rate in points) for name, points in rates.items()}
    for name, rate in peak.items():
        say(f"{name} products: {rate / 1e12:.4g} TFLOP/s at best")
    main = rates["float32" if device.type == "cpu" else "bfloat16"]
    top = max(rate for _, rate in main)
    # A larger product reaches no less than a smaller one: where it seems to, something disturbed it.
    shares = accumulate((rate / top for _, rate in main), max)
    memory = _device_memory(device)
    copied, launch = _copy_bandwidth(device), _launch_latency(device)
    say(f"copy {copied / 1e9:.1f} GB/s, launch {launch * 1e6:.1f} us")
    attention = _attention_efficiency(device, top)
    say(f"attention {attention[0]:.0%} of the products forward, {attention[1]:.0%} backward")
    return replace(
        base,
        name="measured",
        peak=peak,
        matmul=tuple(zip((flops for flops, _ in main), shares)),
        attention=attention,
        memory=memory,
        memory_rate=copied,
        launch=launch,
        sleep=timer_lateness(),
        source=f"measured on {device.type}",
    )


def measure_links(base: Hardware, device: torch.device, say: Say) -> Hardware:
    """Return the profile with measured links between this job's ranks. Collective."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    node = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    inside = network = None
    size = 2
    while size <= len(node):
        inside = measure_link(node[:size], device)
        say(f"inside a node, {size} ranks: {inside.rate / 1e9:.3g} GB/s, {inside.latency * 1e6:.3g} us")
        size *= 2
    if len(first) > 1:
        network = measure_link(first, device)
        say(f"between {len(first)} nodes: {network.rate / 1e9:.3g} GB/s, {network.latency * 1e6:.3g} us")
    return replace(
        base,
        node=len(node) if len(first) > 1 else max(len(node), base.node),
        inside=inside or base.inside,
        network=network or base.network,
    )


def measure_link(ranks: Sequence[int], device: torch.device) -> NetworkLink:
    """Measure the link between these ranks by two all-reduces. All ranks of the job call it and get the result."""
    group, n = dist.new_group(list(ranks)), len(ranks)
    seconds = [0.0, 0.0]
    if dist.get_rank() in ranks:
        for place, count in enumerate((SMALL, LARGE)):
            tensor = torch.ones(count, device=device)
            seconds[place] = _best_seconds(partial(dist.all_reduce, tensor, group=group), device)
    shared = [seconds]
    dist.broadcast_object_list(shared, ranks[0])
    small, large = shared[0]
    return link_from_times(small, large, n)


def link_from_times(small: float, large: float, n: int) -> NetworkLink:
    """Compute a link from the seconds in which n ranks reduce SMALL and LARGE elements.

    On a busy machine the small one can take most of the large one's time, and their difference is noise; the rate is then that of the large one alone.
    """
    left = large - small if large > 2 * small else large
    return NetworkLink(2 * (n - 1) / n * 4 * LARGE / max(left, 1e-9), max(small / (2 * (n - 1)), 1e-7))


def timer_lateness(pause: float = 0.005, rounds: int = 20) -> float:
    """Return by how many seconds a pause of the process ends late: the median of some rounds."""
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        time.sleep(pause)
        seconds.append(time.perf_counter() - begun - pause)
    return max(0.0, statistics.median(seconds))


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: the best of some rounds, each with as many calls as the clock needs."""
    run()
    synchronize(device)
    calls, best = 1, float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        spent = time.perf_counter() - begun
        best = min(best, spent / calls)
        # Ranks of a group must call equally often, so the number follows from nothing that differs between them.
        calls = calls if dist.is_initialized() or spent > LEAST_SECONDS else 4 * calls
    return best


def _measure_matmul_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOPs per second of a square product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _best_seconds(lambda: left @ right, device)


def _copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(COPIED["cpu" if device.type == "cpu" else "cuda"], device=device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _best_seconds(lambda: target.copy_(source), device)


def _launch_latency(device: torch.device) -> float:
    """Return the seconds of an operation on one element."""
    one = torch.ones(1, device=device)

    def launch_200_operations() -> None:
        for _ in range(200):
            one.add_(1.0)

    return _best_seconds(launch_200_operations, device) / 200


def _attention_efficiency(device: torch.device, top: float) -> tuple[float, float]:
    """Return the shares of the best product's rate that causal attention reaches, forward and backward."""
    small = device.type == "cpu"
    batch, heads, length, width = (1, 4, 512, 64) if small else (4, 16, 4096, 128)
    dtype = torch.float32 if small else torch.bfloat16
    q, k, v = (torch.randn(batch, heads, length, width, device=device).to(dtype).requires_grad_() for _ in range(3))
    flops = 2.0 * batch * heads * length**2 * width

    def attention_forward_and_backward() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    with torch.no_grad():
        ahead = _best_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    back = max(_best_seconds(attention_forward_and_backward, device) - ahead, ahead)
    return flops / ahead / top, 2.5 * flops / back / top


def _device_memory(device: torch.device) -> float:
    """Return the bytes of the device; for a CPU those of the machine."""
    if device.type == "cpu":
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float(torch.accelerator.get_memory_info(device)[1])
