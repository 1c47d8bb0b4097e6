"""Networks with states at lengths on both sides of a chunk's end: logits, losses and gradients of transformers' classes in fp32."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families import hf, hf_export
from megatron.core.families.bamba import BAMBA
from megatron.core.families.parameter_mapping import ParameterMapping
from megatron.core.families.registry import FAMILIES
from megatron.core.parallel.boxes import whole_box
from megatron.core.parallel.spec import param_spec_of
from tests.helpers.tiny import VOCABULARY
from tests.parity.test_families import CASES, published, serial

pytest.importorskip("transformers", reason="transformers is not installed")

LENGTHS = (1, 3, 63, 64, 65, 257)
KINDS = (
    "mamba2",
    "nemotron h",
    "nemotron h experts",
    "qwen3 next",
    "qwen3.5",
    "qwen3.5 experts",
    "bamba",
    "olmo hybrid",
    "falcon h1",
)
ALL = [
    pytest.param(kind, length, marks=() if length in (1, 65) else pytest.mark.nightly)
    for kind in KINDS
    for length in LENGTHS
]


def test_a_convolution_that_transformers_cut_in_equal_parts_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, sizes = CASES["olmo hybrid"]
    monkeypatch.setitem(
        CASES, "uneven", (kind, {**sizes, "linear_key_head_dim": 6})
    )  # 12, 12 and 20 channels: saved as 15, 15, 14
    theirs, ids = published("uneven"), torch.arange(20)[None] % VOCABULARY
    theirs.save_pretrained(tmp_path / "uneven")
    logits, expected = serial(tmp_path / "uneven")(ids=ids)[..., :VOCABULARY].transpose(0, 1), theirs(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    hf_export.export_hf_folder(hf.open_hf_folder(tmp_path / "uneven"), tmp_path / "even", like=tmp_path / "uneven")
    again = type(theirs).from_pretrained(tmp_path / "even", dtype=torch.float32)
    assert all(torch.equal(one, theirs.state_dict()[name]) for name, one in again.state_dict().items())


@pytest.mark.parametrize("kind, length", ALL)
def test_a_network_with_states_is_that_of_transformers_at_any_length(
    kind: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With an epsilon of 1e-6 norms of small outputs enlarge roundings: in fp64 transformers' own logits are others by 3e-5.
    epsilon = {"rms_norm_eps": 1e-3} if "qwen" in kind or "olmo" in kind else {}
    sizes = {"max_position_embeddings": 512, **epsilon} if kind != "mamba2" else {}
    monkeypatch.setitem(CASES, kind, (CASES[kind][0], {**CASES[kind][1], "initializer_range": 0.1, **sizes}))
    theirs = published(kind)
    theirs.save_pretrained(tmp_path / "weights")
    stage = serial(tmp_path / "weights")
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
    targets = ids.roll(-1, dims=1).flatten()
    logits, expected = stage(ids=ids)[..., :VOCABULARY].transpose(0, 1), theirs(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    losses = [F.cross_entropy(each.flatten(0, 1), targets) for each in (logits, expected)]
    assert abs(losses[0].item() - losses[1].item()) <= 1e-5 * losses[1].item()
    precise = copy.deepcopy(theirs).double()
    precise.set_experts_implementation("eager")  # the others have no fp64
    exact = _gradients(precise, ids, targets, tmp_path / "exact")
    rounded = _gradients(theirs, ids, targets, tmp_path / "rounded")
    named = {name: param for name, param in stage.named_parameters() if param.requires_grad}
    shapes = {name: param_spec_of(param).shape for name, param in named.items()}
    pairs = {
        name: tuple(folder.read(f"model.{name}", whole_box(shape)).double() for folder in (rounded, exact))
        for name, shape in shapes.items()
    }
    largest = max(float(other.abs().max()) for other, _ in pairs.values())
    for (name, (other, other_exact)), gradient in zip(
        pairs.items(), torch.autograd.grad(losses[0], list(named.values())), strict=True
    ):
        gap = float((gradient[: len(other)] - other).abs().max())
        rounding = float((other - other_exact).abs().max())  # of transformers' own fp32: 1e-5 where a norm enlarges it
        assert gap <= max(1e-5 * largest, 4 * rounding), (
            f"the gradient of {name} differs by {gap:.3g} of {largest:.3g}, where fp32 rounds by {rounding:.3g}"
        )


def _gradients(network: Any, ids: Tensor, targets: Tensor, folder: Path) -> hf.HFCheckpoint:
    """The gradients of transformers' network, saved as its weights are."""
    F.cross_entropy(network(ids).logits.flatten(0, 1), targets).backward()
    for param in network.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    network.save_pretrained(folder)
    return hf.open_hf_folder(folder)


def _attention_a_layer_later(keys: ForeignMapping) -> dict[str, Any]:
    settings = BAMBA.read_config(keys)
    pattern = settings["hybrid_layer_pattern"]
    return {**settings, "hybrid_layer_pattern": pattern[-2:] + pattern[:-2]}


def _whole_heads_turned(keys: ForeignMapping) -> dict[str, Any]:
    return {**BAMBA.read_config(keys), "rotary_percent": 1.0}


def _without_limits_of_steps(keys: ForeignMapping) -> dict[str, Any]:
    return {**BAMBA.read_config(keys), "mamba_time_step_limit": ()}


def _norms_exchanged(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    mixer, mlp = ".input_layernorm.", ".pre_ff_layernorm."

    def exchanged(name: str) -> str:
        return name.replace(mixer, mlp) if mixer in name else name.replace(mlp, mixer)

    return tuple(replace(row, theirs=tuple(map(exchanged, row.theirs))) for row in BAMBA.rows(model))


DEFECTS: dict[str, dict[str, Any]] = {
    "attention stands a layer later": {"read_config": _attention_a_layer_later},
    "attention turns whole heads": {"read_config": _whole_heads_turned},
    "time steps have no limits": {"read_config": _without_limits_of_steps},
    "the norms of mixer and MLP are exchanged": {"rows": _norms_exchanged},
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_mistake_in_how_bamba_is_read_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "bamba", replace(BAMBA, **DEFECTS[name]))
    with pytest.raises((AssertionError, CheckpointError)):
        test_a_network_with_states_is_that_of_transformers_at_any_length("bamba", 65, tmp_path, monkeypatch)
