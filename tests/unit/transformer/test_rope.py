from __future__ import annotations

import math

import pytest
import torch

from megatron.core.config.settings.model import PositionConfig
from megatron.core.transformer.context.rope import rotary_frequencies, rotary_table

CPU = torch.device("cpu")


def test_pair_j_turns_by_base_to_the_minus_two_j_over_size() -> None:
    found = rotary_frequencies(PositionConfig(rotary_base=500.0), 8, CPU, torch.float64)
    assert found.tolist() == pytest.approx([500.0 ** (-2 * j / 8) for j in range(4)], rel=1e-14)


def test_a_share_of_each_head_is_turned_as_if_it_were_the_head() -> None:
    whole = rotary_frequencies(PositionConfig(), 8, CPU, torch.float64)
    assert torch.equal(rotary_frequencies(PositionConfig(rotary_percent=0.5), 16, CPU, torch.float64), whole)


def test_llama3_scaling_is_that_of_the_published_model() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    ours = rotary_frequencies(
        PositionConfig(use_rope_scaling=True, rope_scaling_factor=8.0, rotary_base=500000.0), 128, CPU, torch.float64
    )
    assert factor == 1.0
    torch.testing.assert_close(ours, expected.double(), rtol=1e-5, atol=0.0)
    plain = rotary_frequencies(PositionConfig(rotary_base=500000.0), 128, CPU, torch.float64)
    assert torch.equal(ours[:20], plain[:20]) and ours[-1] == pytest.approx(plain[-1] / 8)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_table_holds_cos_and_sin_of_position_times_frequency_twice(interleaved: bool) -> None:
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    config = PositionConfig(rotary_seq_len_interpolation_factor=2.0)
    table = rotary_table(positions, config, 6, dtype=torch.float64, pairs=interleaved)
    for b in range(2):
        for s in range(4):
            for pair in range(3):
                angle = positions[b, s].item() / 2.0 * 10000.0 ** (-2 * pair / 6)
                for place in (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3):
                    assert table.cos[s, b, 0, place].item() == pytest.approx(math.cos(angle), abs=1e-14)
                    assert table.sin[s, b, 0, place].item() == pytest.approx(math.sin(angle), abs=1e-14)
    assert rotary_table(positions[:1], config, 6, dtype=torch.float32, pairs=interleaved).cos.shape == (4, 1, 1, 6)


YARNS = {  # published settings of rotations, and ours
    "gpt-oss": (
        64,
        {
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        {"rotary_base": 150000.0, "rotary_scaling_factor": 32.0, "yarn_correction_range_round_to_int": False},
    ),
    "deepseek-v3": (
        64,
        {
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        {"rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek, uneven": (
        64,
        {
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.3,
            "original_max_position_embeddings": 2048,
        },
        {
            "rotary_scaling_factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.3,
            "yarn_original_max_position_embeddings": 2048,
        },
    ),
    "qwen": (
        128,
        {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rotary_base": 1e6, "rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 32768},
    ),
    "other borders": (
        32,
        {
            "rope_theta": 500.0,
            "factor": 2.5,
            "beta_fast": 4.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rotary_base": 500.0,
            "rotary_scaling_factor": 2.5,
            "yarn_beta_fast": 4.0,
            "yarn_beta_slow": 2.0,
            "yarn_original_max_position_embeddings": 64,
        },
    ),
    "border behind the last pair": (
        32,
        {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rotary_base": 500.0, "rotary_scaling_factor": 4.0},
    ),
    "border behind the head": (
        32,
        {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 10**9},
        {"rotary_base": 500.0, "rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 10**9},
    ),
    "no growth": (
        32,
        {"rope_theta": 500.0, "factor": 1.0, "original_max_position_embeddings": 64},
        {"rotary_base": 500.0, "yarn_original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("name", YARNS)
def test_yarn_is_that_of_the_published_models(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size, theirs, changes = YARNS[name]
    config = transformers.LlamaConfig(
        hidden_size=2 * size,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "yarn", **theirs},
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    ours = PositionConfig(position_embedding_type="yarn", **changes)
    torch.testing.assert_close(
        rotary_frequencies(ours, size, CPU, torch.float64), expected.double(), rtol=1e-5, atol=0.0
    )
    table = rotary_table(torch.tensor([[0, 5]]), ours, size, dtype=torch.float64, pairs=False)
    assert table.cos[0].unique().item() == pytest.approx(factor, rel=1e-12), (
        "at place 0 the cosine is what rotations grow by"
    )
    angles = torch.cat((5 * expected, 5 * expected)).double()
    torch.testing.assert_close(table.sin[1, 0, 0], factor * angles.sin(), rtol=1e-4, atol=1e-6)


def test_each_pair_turns_by_time_height_or_width() -> None:
    config = PositionConfig(position_embedding_type="mrope", mrope_section=(1, 2, 1), rotary_base=100.0)
    places = torch.tensor([[[3, 1]], [[5, 1]], [[7, 1]]])
    table = rotary_table(places, config, 8, dtype=torch.float64, pairs=False)
    for pair, place in enumerate((3, 5, 5, 7)):
        assert table.sin[0, 0, 0, pair].item() == pytest.approx(math.sin(place * 100.0 ** (-pair / 4)), abs=1e-14)
    plain = rotary_table(
        torch.tensor([[3, 1]]),
        PositionConfig(position_embedding_type="rope", rotary_base=100.0),
        8,
        dtype=torch.float64,
        pairs=False,
    )
    assert torch.equal(table.cos[1], plain.cos[1])
