from __future__ import annotations

import math

import pytest
import torch

from megatron.core.config.model import RopeConfig
from megatron.core.transformer.rope import frequencies, rotary_table

CPU = torch.device("cpu")


def test_pair_j_turns_by_base_to_the_minus_two_j_over_size() -> None:
    found = frequencies(RopeConfig(rotary_base=500.0), 8, CPU, torch.float64)
    assert found.tolist() == pytest.approx([500.0 ** (-2 * j / 8) for j in range(4)], rel=1e-14)


def test_a_share_of_each_head_is_turned_as_if_it_were_the_head() -> None:
    whole = frequencies(RopeConfig(), 8, CPU, torch.float64)
    assert torch.equal(frequencies(RopeConfig(rotary_percent=0.5), 16, CPU, torch.float64), whole)


def test_llama3_scaling_is_that_of_the_published_model() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    ours = frequencies(RopeConfig(use_rope_scaling=True, rope_scaling_factor=8.0, rotary_base=500000.0), 128, CPU, torch.float64)
    assert factor == 1.0
    torch.testing.assert_close(ours, expected.double(), rtol=1e-5, atol=0.0)
    plain = frequencies(RopeConfig(rotary_base=500000.0), 128, CPU, torch.float64)
    assert torch.equal(ours[:20], plain[:20]) and ours[-1] == pytest.approx(plain[-1] / 8)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_table_holds_cos_and_sin_of_position_times_frequency_twice(interleaved: bool) -> None:
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    config = RopeConfig(rotary_interleaved=interleaved, rotary_seq_len_interpolation_factor=2.0)
    table = rotary_table(positions, config, 6, dtype=torch.float64)
    for b in range(2):
        for s in range(4):
            for pair in range(3):
                angle = positions[b, s].item() / 2.0 * 10000.0 ** (-2 * pair / 6)
                for place in ((2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)):
                    assert table.cos[s, b, 0, place].item() == pytest.approx(math.cos(angle), abs=1e-14)
                    assert table.sin[s, b, 0, place].item() == pytest.approx(math.sin(angle), abs=1e-14)
    assert rotary_table(positions[:1], config, 6, dtype=torch.float32).cos.shape == (4, 1, 1, 6)
