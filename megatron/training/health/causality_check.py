"""Before training: does a token reach what it must not reach, on the attention that this run has really chosen?

A mask that is not obeyed costs no error and little loss; a network that sees its own future, or its neighbour's document, trains
well and is worth nothing. So for each kind of layer (its window, its transport over context ranks) some queries, keys and
values of the run's own sizes go through the run's own kernel. Then a token is changed, and of the outputs only these may
change:

    documents   a a a b b b b c c        token 4 of document b, in a window of (1, 0):
    changed     . . . . X . . . .
    may differ  . . . . + + . . .        token 4, and token 5 that sees it

What does not differ is equal to the last bit, as nothing else was put in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.config.plan.layers import LayerPlan, network_layer_plans
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.parallel import collectives
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.mixers.attention import attend
from megatron.training.state.run import RunContext

_SHORTEST = 256  # tokens, or the run's own length if that is less


@dataclass(frozen=True, slots=True)
class AttentionMaskVariant:
    """Layers with the same mask and context-parallel transport. layer: index of one of them."""

    layer: int
    causal: bool
    window: tuple[int, int] | None
    transport: str

    def __str__(self) -> str:
        reach = "layers without a window"
        if self.window is not None:
            reach = f"layers with a window of {self.window[0]},{self.window[1]}"
        return reach + (f" and context transport {self.transport}" if self.transport else "")


def require_causal_attention(run: RunContext) -> None:
    """Probe the run's attention for leaks through masks; `ConfigError` on all ranks if there are any. Collective.
    Nothing is probed if neither documents, windows nor context parallelism are used, or for T5.
    """
    model, mesh, separate = run.config.model, run.mesh, run.config.data.separates_documents
    if model.architecture.is_encoder_decoder or not (
        separate or mesh.cp.size > 1 or any(plan.window for plan in network_layer_plans(model))
    ):
        return
    started = time.perf_counter()
    kernel = next(name for op, name, _ in run.kernels.report if op == "attention")
    layer_kinds = attention_mask_variants(run.layer_build_context, network_layer_plans(model))
    leaks = [
        leak
        for kind in layer_kinds
        if (leak := find_attention_leak(run.layer_build_context, kind, leak_probe_length(run, kind), separate=separate))
    ]
    # All ranks hear of every rank's leaks, so that all refuse together.
    problems = [leak for some in collectives.gather_objects(leaks, mesh.world) for leak in some]
    raise_config_error_if(
        f"the attention kernel {kernel} lets tokens leak: {leak}; choose another --attention-backend"
        for leak in problems
    )
    run.print_rank_0(
        f"causality check: {kernel} attention keeps hidden tokens apart in {len(layer_kinds)} kinds of layers "
        f"({time.perf_counter() - started:.2f} s)"
    )


def attention_mask_variants(build: LayerBuildContext, plans: tuple[LayerPlan, ...]) -> list[AttentionMaskVariant]:
    """Return each variant (mask, window, transport) of the network's attention layers once."""
    types = build.cp_comm_type
    rows: dict[tuple, AttentionMaskVariant] = {}
    for plan in plans:
        if not plan.has_attention:
            continue
        transport = types[plan.index % len(types)] if build.mesh.cp.size > 1 else ""
        key = (plan.causal, plan.window, transport)
        rows.setdefault(key, AttentionMaskVariant(plan.index, *key))
    return list(rows.values())


def leak_probe_length(run: RunContext, kind: AttentionMaskVariant) -> int:
    """Return a probe's tokens: past both ends of a window, and enough for kernels of short windows to be used."""
    reach = 0 if kind.window is None else max(0, *kind.window)
    unit = 2 * run.mesh.cp.size
    length = min(run.config.train.seq_length, max(_SHORTEST, 4 * reach + _SHORTEST))
    return max(unit, length // unit * unit)


@torch.no_grad()
def find_attention_leak(build: LayerBuildContext, kind: AttentionMaskVariant, length: int, *, separate: bool) -> str:
    """Return in words which hidden token changes an output of this rank in layers of this kind, or "". Collective.
    length: tokens of the probe. separate: mask documents apart.
    """
    # Borders that are no borders of ranks or blocks.
    documents = (torch.arange(length) // max(1, length * 3 // 10))[None]
    inputs = _random_qkv(build, length)
    before = _attention_outputs(build, kind, inputs, documents if separate else None)
    local = Zigzag(length, build.mesh.cp.size).positions_of_rank(build.mesh.cp.rank, torch.device("cpu"))
    border, problem = int((documents == 1).nonzero()[0, 1]), ""
    for place in sorted({border - 1, border, length // 2, length - 2} & set(range(length))):
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[place] += 4.0
        after = _attention_outputs(build, kind, changed, documents if separate else None)
        differs = (after != before).flatten(1).any(dim=1).cpu()
        distance = local - place
        left, right = kind.window or (-1, -1)
        may = (distance >= 0) if kind.causal else torch.ones_like(local, dtype=torch.bool)
        may &= (distance <= left) | (left < 0)
        may &= (-distance <= right) | (right < 0)
        if separate:
            may &= documents[0, local] == documents[0, place]
        # And on with the others: another rank may have found nothing, and waits for this one.
        if not problem and (leaks := local[differs & ~may]).numel():
            problem = f"in {kind}, token {place} reaches token {int(leaks[0])} of {length}, which must not see it"
        if not problem and not (differs | (local != place)).all():
            problem = f"in {kind}, token {place} of {length} does not even see itself"
    return problem


def _random_qkv(build: LayerBuildContext, length: int) -> list[Tensor]:
    """Return random q, k and v [length, 1, heads, size] of a whole sequence, with a rank's number of heads."""
    model, tp = build.model, build.mesh.tp.size
    size = model.head_size_before_rotary_percent + (model.mla.qk_head_dim if model.mla.multi_latent_attention else 0)
    heads, groups = model.num_attention_heads // tp, max(1, model.num_query_groups // tp)
    value_size = model.mla.v_head_dim if model.mla.multi_latent_attention else model.kv_channels
    shapes = ((heads, size), (groups, size), (groups, value_size))
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, 1, *shape, generator=generator).to(build.mesh.device, build.dtype) for shape in shapes]


def _attention_outputs(
    build: LayerBuildContext, kind: AttentionMaskVariant, inputs: list[Tensor], documents: Tensor | None
) -> Tensor:
    """Return this rank's attention outputs, [s/cp, 1, n/tp * dv]."""
    cp, length = build.mesh.cp, len(inputs[0])
    pieces = [Zigzag(length, cp.size).shard(x, cp.rank) for x in inputs]
    mask = AttentionMaskSpec(
        causal=kind.causal, documents=None if documents is None else documents.to(build.mesh.device)
    )
    if cp.group is not None:
        mask = replace(mask, query_places=build.local_positions(len(pieces[0])), length=length)
    layer = build.with_context_parallel_attention(kind.layer)
    sink = pieces[0].new_zeros(pieces[0].shape[2]) if build.model.softmax_type != "vanilla" else None
    q, k, v = pieces
    return attend(layer, q, k, v, mask.with_window(kind.window), AttentionScoreModifiers(sink=sink), training=False)
