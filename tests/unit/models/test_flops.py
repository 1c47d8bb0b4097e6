"""Counts against a hand-written torch GPT: its parameter shapes, its FLOPs by torch's counter, its saved tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.config.plan.layers import partition_into_stages, uniform_layer_plans
from megatron.core.config.settings.model import ModelConfig, PositionConfig
from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import RecomputeConfig, RunConfig, TrainConfig
from megatron.core.models import flops
from megatron.core.models.describe import WeightShardCounts, count_parameters, count_rank_parameters
from tests.helpers import tiny
from tests.helpers.counts import count_layer_parameters

S, B = 32, 2
PLAIN = dict(num_layers=3, hidden_size=24, num_attention_heads=4, max_position_embeddings=S, padded_vocab_size=80)
SHAPES = {
    "gpt2": {},
    "llama": dict(
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        group_query_attention=True,
        num_query_groups=2,
        untie_embeddings_and_output_weights=True,
        ffn_hidden_size=40,
        rope=PositionConfig(position_embedding_type="rope"),
    ),
    "wide heads": dict(kv_channels=10, qk_layernorm=True, group_query_attention=True, num_query_groups=1),
    "qkv bias": dict(add_bias_linear=False, add_qkv_bias=True, quick_geglu=True),
}


def shape(name: str, **more) -> ModelConfig:
    return ModelConfig(**{**PLAIN, **SHAPES[name], **more}).resolve()


class Norm(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        return (
            F.layer_norm(x, shape, self.weight, self.bias)
            if self.bias is not None
            else F.rms_norm(x, shape, self.weight)
        )


class Swiglu(torch.autograd.Function):
    """The gated activation as fused kernels do it: only its two inputs are kept for the backward pass."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(F.silu(gate) * up, (gate, up), gradient)


def dropout(x: Tensor, probability: float) -> Tensor:
    """Dropout that keeps one byte an element, as on a GPU; torch's CPU default keeps the scaled mask."""
    return torch.native_dropout(x, probability, True)[0] if probability > 0 else x


class Block(nn.Module):
    """One pre-norm layer, every matrix apart, so that nothing is shared with the code under test."""

    def __init__(self, c: ModelConfig, plain_attention: bool) -> None:
        super().__init__()
        heads, groups, d = c.num_attention_heads, c.num_query_groups, c.kv_channels
        bias, h = c.add_bias_linear, c.hidden_size
        self.c, self.plain = c, plain_attention
        self.norms = nn.ModuleList(Norm(c.normalization, h) for _ in range(2))
        self.q = nn.Linear(h, heads * d, bias=bias or c.add_qkv_bias)
        self.k, self.v = (nn.Linear(h, groups * d, bias=bias or c.add_qkv_bias) for _ in range(2))
        self.head_norms = nn.ModuleList(Norm(c.normalization, d) for _ in range(2)) if c.qk_layernorm else None
        self.out = nn.Linear(heads * d, h, bias=bias)
        self.up = nn.Linear(h, c.ffn_hidden_size, bias=bias)
        self.gate = nn.Linear(h, c.ffn_hidden_size, bias=bias) if c.swiglu or c.quick_geglu else None
        self.down = nn.Linear(c.ffn_hidden_size, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        c, y = self.c, self.norms[0](x)
        q, k, v = (m(y).unflatten(-1, (-1, c.kv_channels)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if self.head_norms is not None:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        if self.plain:
            k, v = (t.repeat_interleave(c.num_attention_heads // c.num_query_groups, dim=1) for t in (k, v))
            attended = dropout(torch.softmax(q @ k.transpose(-1, -2), -1), c.attention_dropout) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + dropout(self.out(attended.transpose(1, 2).flatten(2)), c.hidden_dropout)
        y = self.norms[1](x)
        inner = Swiglu.apply(self.gate(y), self.up(y)) if self.gate is not None else F.gelu(self.up(y))
        return x + dropout(self.down(inner), c.hidden_dropout)


class GPT(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        h = c.hidden_size
        self.words = nn.Embedding(c.padded_vocab_size, h)
        self.places = nn.Embedding(S, h) if c.rope.position_embedding_type == "learned_absolute" else None
        self.blocks = nn.ModuleList(Block(c, plain_attention=True) for _ in range(c.num_layers))
        self.norm = Norm(c.normalization, h)
        self.head = nn.Linear(h, c.padded_vocab_size, bias=False)
        if not c.untie_embeddings_and_output_weights:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.places is not None:
            x = x + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_a_built_network(name):
    config = shape(name)
    network, count = GPT(config), count_parameters(config)
    assert count.total == elements(network)
    assert count.block == elements(network.blocks)
    assert count.embedding == elements(network.words) + (elements(network.places) if network.places else 0)
    assert count.final_norm == elements(network.norm)


@pytest.mark.parametrize("name", SHAPES)
def test_square_flops_are_what_torch_counts_in_a_step(name):
    config = shape(name)
    network = GPT(config)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(B, S, dtype=torch.long)).sum().backward()
    assert B * flops.flops_per_sample(config, S, "square") == counter.get_total_flops()


@pytest.mark.parametrize("name", SHAPES)
def test_causal_flops_leave_out_half_of_the_scores(name):
    config = shape(name)
    scores = config.num_layers * config.num_attention_heads * 3 * 2 * (2 * S * S * config.kv_channels)
    square, causal = (flops.flops_per_sample(config, S, count) for count in ("square", "causal"))
    assert square - causal == scores / 2
    assert flops.flops_per_sample(config, S) == causal


def test_published_sizes_are_met():
    gpt2 = ModelConfig(
        num_layers=12, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024, padded_vocab_size=50257
    ).resolve()
    llama = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=14336,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=128256,
        max_position_embeddings=8192,
        rope=PositionConfig(position_embedding_type="rope"),
    ).resolve()
    assert count_parameters(gpt2).total == 124_439_808
    assert count_parameters(llama).total == 8_030_261_248


def test_describing_a_network_leaves_the_random_generator_as_it_is():
    before = torch.get_rng_state()
    count_parameters(shape("llama", num_layers=5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("pp, vpp", [(1, 1), (3, 1), (2, 2)])
def test_stages_hold_the_network_once_and_a_tied_head_twice(name, pp, vpp):
    config = shape(name, num_layers=12)
    stages = partition_into_stages(uniform_layer_plans(12), pp=pp, vpp=vpp)
    held = sum(count_rank_parameters(config, [s for s in stages if s.rank == rank]).total for rank in range(pp))
    copy = 80 * 24 if config.ties_embeddings and pp > 1 else 0
    assert held == count_parameters(config).total + copy


def test_tensor_ranks_cut_matrices_and_repeat_what_cannot_be_cut():
    config = shape("wide heads", add_bias_linear=True)  # one key head, so both ranks hold it
    h, q, k, f = 24, 20, 10, 48
    norms = 2 * 2 * h + 2 * 2 * 10
    expected = h * (q + 2 * k) + (q + 2 * k) + q * h + h + h * f + f + f * h + h + norms
    assert count_layer_parameters(config, WeightShardCounts(2, 1, 2)) == expected
    gated = shape("llama")
    whole = count_layer_parameters(gated) - 2 * h
    assert count_layer_parameters(gated, WeightShardCounts(2, 1, 2)) == whole // 2 + 2 * h


def run_config(model: ModelConfig, *, precision=None, parallel=None, recompute=None, optimizer=None) -> RunConfig:
    return RunConfig(
        model=model,
        train=TrainConfig(seq_length=S, micro_batch_size=B),
        precision=precision or PrecisionConfig(bf16=True),
        parallel=parallel or ParallelConfig(),
        recompute=recompute or RecomputeConfig(),
        optimizer=optimizer or OptimizerConfig(),
    )


@pytest.mark.parametrize(
    "precision, constant, shared, copied",
    [
        (dict(bf16=True), 6, 12, 0),
        (dict(fp16=True), 4, 16, 4),
        (dict(), 8, 8, 0),
        (dict(fp16=True, accumulate_allreduce_grads_in_fp32=True), 6, 12, 0),
    ],
)
def test_state_bytes_follow_the_published_table_with_copies_of_gradients_in_the_update_only(
    precision, constant, shared, copied
):
    for cut in (False, True):
        config = run_config(
            shape("gpt2"),
            precision=PrecisionConfig(**precision),
            parallel=ParallelConfig(use_distributed_optimizer=cut),
        )
        shards = 8 if cut else 1
        assert flops.training_state_bytes_per_param(config, 8) == constant + (shared - copied) / shards
        assert flops.update_temporaries_per_parameter(config, 8) == copied / shards
    whole = run_config(
        shape("gpt2"), precision=PrecisionConfig(**precision), parallel=ParallelConfig(use_torch_fsdp2=True)
    )
    assert flops.training_state_bytes_per_param(whole, 8) == 4 * (1 + 1 + 2) / 8, (
        "weight, gradient and two moments in fp32, all of them cut"
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("probability", [0.0, 0.1])
@pytest.mark.parametrize("plain", [False, True])
def test_layer_activations_are_what_autograd_saves(name, probability, plain):
    # Of the norms torch keeps more than their input in RMSNorm, which has no fused CPU kernel: LayerNorm for both.
    model = shape(
        name,
        hidden_size=64,
        ffn_hidden_size=160,
        kv_channels=16,
        hidden_dropout=probability,
        attention_dropout=probability,
        attention_backend="local" if plain else "flash",
        normalization="LayerNorm",
        num_query_groups=4 if plain else 2,
    )
    block = Block(model, plain_attention=plain)
    own, saved = {p.untyped_storage().data_ptr() for p in block.parameters()}, {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(torch.randn(B, S, 64, requires_grad=True))
    estimate = B * S * flops.layer_activation_bytes_per_token(run_config(model, precision=PrecisionConfig()))
    assert sum(saved.values()) == pytest.approx(estimate, rel=0.04)
    del output


def test_activations_with_selective_recompute_and_sequence_parallel_are_the_papers_formula():
    """s b h (18 + 4 f/h) / t a layer, of Korthikanti et al. as Megatron counts it."""
    model = shape("gpt2", num_layers=8, num_attention_heads=4)
    config = run_config(
        model,
        parallel=ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=4),
        recompute=RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn",)),
    )
    stages = partition_into_stages(uniform_layer_plans(8), pp=4)
    memory = flops.estimate_memory_by_pipeline_rank(config, stages, data_parallel_size=1, num_microbatches=16)
    layer = S * B * 24 * (18 + 4 * 96 / 24) / 2
    for position, alive in ((1, 3), (2, 2)):
        assert memory[position].activations == pytest.approx(2 * alive * layer)
        assert memory[position].weights_and_optimizer == 18 * 2 * count_layer_parameters(
            model, WeightShardCounts(2, 1, 2)
        )
    assert memory[0].activations == pytest.approx(4 * (2 * layer + S * B * (8 + 24 / 2)))
    assert memory[3].activations == pytest.approx(2 * layer + 4 * S * B * (24 + 80) / 2)


def test_fewer_microbatches_than_stages_keep_fewer_alive():
    config = run_config(shape("gpt2", num_layers=4), parallel=ParallelConfig(pipeline_model_parallel_size=4))
    few, many = (
        flops.estimate_memory_by_pipeline_rank(
            config, partition_into_stages(uniform_layer_plans(4), pp=4), data_parallel_size=1, num_microbatches=m
        )
        for m in (2, 100)
    )
    assert many[0].activations == 2 * few[0].activations
    assert many[3] == few[3]


def test_there_and_back_every_rank_holds_as_many_chunks_and_the_first_one_both_ends() -> None:
    config = run_config(
        shape("gpt2", num_layers=8, hidden_dropout=0.0),
        parallel=ParallelConfig(pipeline_model_parallel_size=4, pipeline_schedule="zb-v"),
    )
    stages = partition_into_stages(uniform_layer_plans(8), pp=4, vpp=2, placement="v")
    memory = flops.estimate_memory_by_pipeline_rank(config, stages, data_parallel_size=1, num_microbatches=8)
    layer = S * B * flops.layer_activation_bytes_per_token(config)
    assert [held.activations / layer for held in memory[1:]] == pytest.approx([8, 8, 8])
    layers = count_rank_parameters(config.model, [stage for stage in stages if stage.rank == 1]).total
    network = count_parameters(config.model)
    assert (
        memory[0].parameters
        == layers + network.embedding + network.final_norm + config.model.padded_vocab_size * config.model.hidden_size
    )


@pytest.mark.parametrize(
    "method, group, chunks_kept, at_work", [("uniform", 1, 4, 1), ("uniform", 2, 2, 2), ("block", 4, 4, 1)]
)
def test_full_recompute_keeps_inputs_and_one_group_at_work(method, group, chunks_kept, at_work):
    model = shape("gpt2", num_layers=4)
    config = run_config(
        model,
        recompute=RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=group),
    )
    none = dataclasses.replace(config, recompute=RecomputeConfig())
    (memory,) = flops.estimate_memory_by_pipeline_rank(
        config, partition_into_stages(uniform_layer_plans(4), pp=1), data_parallel_size=1, num_microbatches=1
    )
    (whole,) = flops.estimate_memory_by_pipeline_rank(
        none, partition_into_stages(uniform_layer_plans(4), pp=1), data_parallel_size=1, num_microbatches=1
    )
    layer = flops.layer_activation_bytes_per_token(none)
    saved = (whole.activations - memory.activations) / (S * B)
    assert saved == pytest.approx(4 * layer - (chunks_kept * 2 * 24 + at_work * layer))


def test_interleaving_keeps_more_alive_on_the_first_rank():
    """Warm-up 2 (pp - 1) + (vpp - 1) pp chunk passes, and one more: 11 chunks of 1 layer against 4 passes of 2 layers."""

    def first(vpp: int) -> float:
        config = run_config(
            shape("gpt2", num_layers=8, hidden_dropout=0.0), parallel=ParallelConfig(pipeline_model_parallel_size=4)
        )
        memory = flops.estimate_memory_by_pipeline_rank(
            config,
            partition_into_stages(uniform_layer_plans(8), pp=4, vpp=vpp),
            data_parallel_size=1,
            num_microbatches=8,
        )
        return memory[0].activations / (S * B * flops.layer_activation_bytes_per_token(config))

    assert first(2) == pytest.approx(11, rel=0.01)
    assert first(1) == pytest.approx(8, rel=0.01)


def test_an_image_costs_the_products_of_its_encoder_and_projector() -> None:
    sizes = {"img_h": 8, "img_w": 8, "patch_dim": 4, "vision_num_layers": 2, "vision_hidden_size": 8}
    sizes |= {"vision_ffn_hidden_size": 12, "vision_num_attention_heads": 2, "vision_projection_hidden_size": 10}
    model = tiny.config(vision_model_type="clip", disable_vision_class_token=True, **sizes).model
    text = tiny.config().model
    patches, tokens, hidden = 4, 5, 8
    layer = 4 * hidden * hidden + 2 * hidden * 12
    filters, layers = 2 * patches * 48 * hidden, 2 * tokens * (2 * layer + 4 * tokens * hidden)
    first, second = (2 * patches * size for size in (hidden * 10, 10 * model.hidden_size))
    trained = 2 * filters + 3 * (layers + first + second)  # pixels have no gradient
    assert flops.flops_per_sample(model, 16) - flops.flops_per_sample(text, 16) == trained
    frozen = tiny.config(vision_model_type="clip", disable_vision_class_token=True, freeze_ViT=True, **sizes).model
    half = filters + layers + 2 * first + 3 * second
    assert flops.flops_per_sample(frozen, 16) - flops.flops_per_sample(text, 16) == half
