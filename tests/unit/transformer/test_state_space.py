"""Mamba-2's mixer and the gated delta net against transformers', token by token, and cut over tensor and context ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.mixers.gated_delta_net import DeltaNetSizes
from megatron.core.config.mixers.mamba import MambaSizes
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import local_shard_boxes, param_spec_of, set_global_param_names
from megatron.core.transformer.context.cache import Mix, MixerState
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.mixers.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.mixers.mamba import MambaMixer
from tests.helpers import tiny
from tests.helpers.world import Worlds

H, B = 32, 2
MAMBA = MambaSizes(heads=8, head=4, groups=2, state=6, step_limits=(0.001, float("inf")))
DELTA = DeltaNetSizes(key_heads=4, value_heads=8, key_size=6, value_size=5)
KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "mamba": lambda build: MambaMixer(build, MAMBA),
    "delta": lambda build: GatedDeltaNet(build, DELTA),
}


def mixer_of(kind: str, ranks: int = 1, **changes: Any) -> tuple[nn.Module, tiny.RunContext]:
    settings = {"init_method_std": 0.3, "normalization": "RMSNorm", "fp64": True, **changes}
    run = tiny.run_of(tiny.config(ranks, **settings))
    mixer = KINDS[kind](run.layer_build_context)
    set_global_param_names(mixer)
    materialize_parameters(mixer, run.mesh, seed=5)
    return mixer, run


def _mamba_theirs() -> nn.Module:
    nemotron = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    config = nemotron.NemotronHConfig(
        hidden_size=H, mamba_num_heads=MAMBA.heads, mamba_head_dim=MAMBA.head, n_groups=MAMBA.groups, ssm_state_size=MAMBA.state,
        chunk_size=16, layers_block_type=["mamba"], num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return nemotron.NemotronHMamba2Mixer(config, 0)


def _delta_theirs() -> nn.Module:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = qwen.Qwen3NextConfig(
        hidden_size=H, linear_num_key_heads=DELTA.key_heads, linear_num_value_heads=DELTA.value_heads, linear_key_head_dim=DELTA.key_size,
        linear_value_head_dim=DELTA.value_size, num_hidden_layers=1, rms_norm_eps=1e-5,
    )  # fmt: skip
    return qwen.Qwen3NextGatedDeltaNet(config, 0)


def _delta_rows() -> Tensor:
    """Which rows of transformers' two projections, one behind the other, are the rows of q, k, v, z, b and a."""
    repeats = DELTA.value_heads // DELTA.key_heads
    sizes = (DELTA.key_size, DELTA.key_size, repeats * DELTA.value_size, repeats * DELTA.value_size)
    wide = torch.arange(DELTA.key_heads * sum(sizes)).view(DELTA.key_heads, -1).split(sizes, dim=1)
    narrow = (torch.arange(2 * DELTA.value_heads).view(DELTA.key_heads, -1) + sum(part.numel() for part in wide)).chunk(
        2, dim=1
    )
    return torch.cat([part.flatten() for part in (*wide, *narrow)])


def _load(kind: str, ours: nn.Module, theirs: nn.Module) -> dict[str, nn.Parameter]:
    """Draw transformers' weights, give them to ours; name (ours) -> their parameter, where one is one."""
    for name, param in theirs.named_parameters():
        nn.init.normal_(param, 1.0 if "norm" in name else 0.0, 0.3)
    same = dict(theirs.named_parameters())
    if kind == "mamba":
        same["dt_bias"].data[::2] -= 9.0  # time steps of these heads are below the smallest allowed
    state = {name: param.detach() for name, param in same.items()}
    if kind == "delta":
        rows = torch.cat((state.pop("in_proj_qkvz.weight"), state.pop("in_proj_ba.weight")))[_delta_rows()]
        state = {"in_proj.weight": rows, "out_norm.weight": state.pop("norm.weight"), **state}
        same["out_norm.weight"] = same.pop("norm.weight")
    with torch.no_grad():
        for name, param in ours.named_parameters():
            param.copy_(state.pop(name).view_as(param))
    assert not state, f"nothing took {sorted(state)}"
    return same


@pytest.mark.parametrize("length", (1, 3, 63, 64, 65, 257))
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixer_gives_the_outputs_and_gradients_of_transformers(kind: str, length: int) -> None:
    ours, _ = mixer_of(kind, fp64=False)
    theirs = {"mamba": _mamba_theirs, "delta": _delta_theirs}[kind]()
    same = _load(kind, ours, theirs)
    x = torch.randn(length, B, H)
    x_ours, x_theirs = x.clone().requires_grad_(), x.transpose(0, 1).clone().requires_grad_()
    found = ours(x_ours, ForwardContext(AttentionMaskSpec()))
    expected = theirs(x_theirs)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected.transpose(0, 1) * weights).sum().backward()
    pairs = {"output": (found, expected.transpose(0, 1)), "input": (x_ours.grad, x_theirs.grad.transpose(0, 1))}
    pairs |= {name: (p.grad, same[name].grad.view_as(p)) for name, p in ours.named_parameters() if name in same}
    for name, (a, b) in pairs.items():
        gap = (a - b).abs().max().item()
        assert gap <= 1e-5 * max(1.0, b.abs().max().item()), f"{name}: {gap:.3g} of {b.abs().max():.3g}"


class OneBatchCache:
    """The states of one batch of sequences, in the place of a decoding cache."""

    def __init__(self, state: MixerState) -> None:
        self.state = state

    def run_from_states(self, mixer: Any, parts: Sequence[Tensor], mix: Mix) -> Tensor:
        outputs, self.state = mix(list(parts), self.state)
        return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_token_by_token_gives_the_whole_pass(kind: str) -> None:
    mixer, _ = mixer_of(kind)
    x = torch.randn(40, B, H, dtype=torch.float64)
    with torch.no_grad():
        whole = mixer(x, ForwardContext(AttentionMaskSpec()))
        context = ForwardContext(AttentionMaskSpec(), cache=OneBatchCache(mixer.initial_state(B)))  # type: ignore[arg-type]
        outputs = [mixer(part, context) for part in x.split([17, *(1 for _ in range(17, 40))])]
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_mixed_as_if_each_were_alone(kind: str) -> None:
    mixer, _ = mixer_of(kind)
    x = torch.randn(40, B, H, dtype=torch.float64)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([9, 1, 22, 8])).expand(B, -1)
    with torch.no_grad():
        whole = mixer(x, ForwardContext(AttentionMaskSpec(documents=documents)))
        alone = torch.cat([mixer(part, ForwardContext(AttentionMaskSpec())) for part in x.split([9, 1, 22, 8])])
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-10)


def _pass(
    kind: str, ranks: int, packed: bool, length: int, changes: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of the whole network, put together from all ranks, of sum(output * weights)."""
    mixer, run = mixer_of(kind, ranks, **changes)
    mesh, region = run.mesh, run.layer_build_context.tp_region
    generator = torch.Generator().manual_seed(3)
    x, weights = torch.randn(2, length, B, H, dtype=torch.float64, generator=generator)
    documents = (
        torch.repeat_interleave(torch.arange(3), torch.tensor([5, 10, length - 15])).expand(B, -1) if packed else None
    )
    cut = Zigzag(length, mesh.cp.size)
    mask = AttentionMaskSpec(documents=documents)
    if mesh.cp.size > 1:
        mask = AttentionMaskSpec(
            documents=documents, query_places=cut.positions_of_rank(mesh.cp.rank, x.device), length=length
        )
    own, scale = (cut.shard(each, mesh.cp.rank) for each in (x, weights))
    if region.sequence_parallel:
        own, scale = (each.chunk(mesh.tp.size)[mesh.tp.rank] for each in (own, scale))
    output = mixer(own, ForwardContext(mask))
    (output * scale).sum().backward()
    whole = collectives.all_gather(output.detach(), mesh.tp) if region.sequence_parallel else output.detach()
    pieces = torch.cat([torch.cat(list(piece)) for piece in collectives.all_gather(whole[None], mesh.cp).split(1)])
    gradients = {}
    for param in mixer.parameters():
        spec, gradient = param_spec_of(param), collectives.all_reduce(param.grad.double().clone(), mesh.cp)
        if "tp" in spec.sum_over:
            collectives.all_reduce(gradient, mesh.tp)
        total = torch.zeros(spec.shape, dtype=torch.float64)
        for shard in local_shard_boxes(spec, mesh):
            total[shard.box.slices()] = gradient[shard.local.slices()]
        gradients[spec.name] = collectives.all_reduce(total, mesh.tp) if spec.shards else total
    return pieces[cut.sorting_permutation(range(cut.size), x.device)], gradients


@pytest.mark.parametrize(
    "kind, layout",
    [
        ("mamba", {"tensor_model_parallel_size": 2}),
        ("mamba", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        ("mamba", {"context_parallel_size": 2}),
        ("mamba", {"context_parallel_size": 4}),  # more ranks than groups
        ("mamba", {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
        ("delta", {"tensor_model_parallel_size": 2}),
        ("delta", {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
        ("delta", {"context_parallel_size": 4}),
        ("delta", {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else " ".join(f"{k.split('_')[0]}{int(v)}" for k, v in value.items())
    ),
)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_a_mixer_cut_over_ranks_gives_the_serial_outputs_and_gradients(
    world: Worlds, kind: str, layout: dict[str, Any], packed: bool
) -> None:
    ranks = layout.get("tensor_model_parallel_size", 1) * layout.get("context_parallel_size", 1)
    expected, gradients = _pass(kind, 1, packed, 40, {})
    for output, found in world(ranks).run(_pass, kind, ranks, packed, 40, layout):
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-10, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixer_is_one_graph_of_torchs_compiler(kind: str) -> None:
    mixer, _ = mixer_of(kind)
    x = torch.randn(300, B, H, dtype=torch.float64, requires_grad=True)  # two spans of chunks at least

    def call(x: Tensor) -> Tensor:
        return mixer(x, ForwardContext(AttentionMaskSpec()))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = [(y := way(x), *torch.autograd.grad(y.square().sum(), [x, mixer.A_log])) for way in (call, compiled)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
