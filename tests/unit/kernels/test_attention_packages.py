"""Attention of other libraries: our masks and scores in their words, against the reference, with stand-ins for what is not here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron.core.config.flags.declare import ConfigError
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.table import CANDIDATES, KernelRequirements, select_kernels
from megatron.core.kernels.external import flash_attn, transformer_engine
from megatron.core.kernels.ops import flex, fused, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.packed_document_starts import PackedDocumentStarts
from megatron.training.health.causality_check import require_causal_attention
from tests.helpers import flash_attn_stand_in, flex_stand_in, tiny, transformer_engine_stand_in
from tests.unit.kernels.test_ops import check, with_gradients

S, B, N, G, D = 11, 2, 4, 2, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [3, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5]])
MASKS = {
    "causal": AttentionMaskSpec(),
    "bidirectional": AttentionMaskSpec(causal=False),
    "documents": AttentionMaskSpec(documents=DOCUMENTS),
    "window": AttentionMaskSpec(window=(3, 0)),
    "two-sided": AttentionMaskSpec(causal=False, window=(2, 1)),
    "left only": AttentionMaskSpec(window=(2, -1)),
    "window of documents": AttentionMaskSpec(documents=DOCUMENTS, window=(2, 0)),
    "documents both ways": AttentionMaskSpec(causal=False, documents=DOCUMENTS),
}
SCORES = {
    "plain": AttentionScoreModifiers(),
    "scaled": AttentionScoreModifiers(scale=0.7),
    "capped": AttentionScoreModifiers(softcap=0.9),
    "both": AttentionScoreModifiers(scale=1.3, softcap=2.0),
}
GPU = KernelRequirements(device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions are there, on a Hopper GPU."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_stand_in.version_2())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_stand_in.version_3())
    monkeypatch.setattr(
        flash_attn, "is_flash_attn_installed", lambda version: flash_attn.PACKAGES[version] in sys.modules
    )
    monkeypatch.setattr(flash_attn, "is_hopper_gpu", lambda: True)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformer Engine is there."""
    for name, module in transformer_engine_stand_in.package().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(transformer_engine, "is_te_installed", lambda: True)
    transformer_engine._te_attention_module.cache_clear()
    yield
    transformer_engine._te_attention_module.cache_clear()


def heads(queries: int = S) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(length, B, n, D, dtype=torch.float64).requires_grad_()
        for length, n in ((queries, N), (S, G), (S, G))
    ]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("version", [2, 3])
def test_a_package_is_told_what_the_reference_computes(packages: None, version: int, mask: str, scores: str) -> None:
    call = partial(flash_attn.attention_by_flash_attn, version=version)
    check(
        with_gradients(lambda *qkv: call(*qkv, MASKS[mask], 0.0, SCORES[scores]), *heads()),
        with_gradients(lambda *qkv: reference.softmax_attention(*qkv, MASKS[mask], 0.0, SCORES[scores]), *heads()),
        1e-12,
    )


@pytest.mark.parametrize("version", [2, 3])
def test_a_package_serves_the_last_queries_alone_and_leaves_the_masks_of_generation_to_torch(
    packages: None, version: int
) -> None:
    call = partial(flash_attn.attention_by_flash_attn, version=version)
    padding = torch.ones(B, S, dtype=torch.bool)
    padding[0, :3] = False
    for mask in (
        AttentionMaskSpec(),
        AttentionMaskSpec(padding=padding),
        AttentionMaskSpec(query_places=torch.arange(S - 3, S)),
        AttentionMaskSpec(documents=DOCUMENTS),
        AttentionMaskSpec(documents=DOCUMENTS, query_documents=DOCUMENTS[:, -3:]),
    ):
        q, k, v = heads(3)
        torch.testing.assert_close(
            call(q, k, v, mask), reference.softmax_attention(q, k, v, mask), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("mask", [*MASKS, "padding", "places", "fewer queries", "fewer queries in a window"])
def test_transformer_engine_is_told_what_the_reference_computes(library: None, mask: str, scale: float | None) -> None:
    padding = torch.ones(B, S, dtype=torch.bool).index_fill_(1, torch.tensor([0, 1]), False)
    more = {
        "padding": AttentionMaskSpec(padding=padding),
        "places": AttentionMaskSpec(query_places=torch.arange(S - 3, S)),
        "fewer queries": AttentionMaskSpec(),
        "fewer queries in a window": AttentionMaskSpec(window=(4, 0)),
    }
    one, queries, scores = (
        {**MASKS, **more}[mask],
        3 if mask == "places" or "fewer" in mask else S,
        AttentionScoreModifiers(scale=scale),
    )
    check(
        with_gradients(lambda *qkv: transformer_engine.attention_by_te(*qkv, one, 0.0, scores), *heads(queries)),
        with_gradients(lambda *qkv: reference.softmax_attention(*qkv, one, 0.0, scores), *heads(queries)),
        1e-12,
    )
    q, k, v = heads()
    output = transformer_engine.attention_by_te(
        q, k, v[..., :5], AttentionMaskSpec()
    )  # values of another size than keys
    torch.testing.assert_close(
        output, reference.softmax_attention(q, k, v[..., :5], AttentionMaskSpec()), rtol=1e-12, atol=1e-12
    )


def test_a_library_that_is_preferred_comes_first_where_it_can_serve(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for impl, preferred in (
        ("local", ""),
        ("transformer_engine", "transformer_engine"),
    ):  # "local" is also the name of a kernel
        assert kernel_requirements(tiny.config(transformer_impl=impl), torch.device("cpu")).preferred == preferred
    assert select_kernels(kernel_requirements(tiny.config(), torch.device("cpu"))).attention is fused.attention_by_sdpa
    wanted = replace(GPU, preferred="transformer_engine")
    assert (
        select_kernels(GPU).attention is fused.attention_by_sdpa
        and select_kernels(wanted).attention is transformer_engine.attention_by_te
    )
    assert select_kernels(wanted, {"attention": "unfused"}).attention is reference.softmax_attention, (
        "what is asked for by name goes before"
    )
    for change, why in (
        ({"dtype": torch.float32}, "it needs fp16 or bf16"),
        ({"sinks": True}, "its sinks are its own"),
        ({"softcap": True}, "it has no cap on scores"),
        ({"pieces": True}, "sequences are cut over context ranks"),
        ({"padding": True}, "padding is left out by a mask tensor"),
        ({"biased_scores": True}, "it adds nothing to scores"),
        ({"device": "cpu"}, "it needs a CUDA device"),
    ):
        found = select_kernels(replace(wanted, **change))
        assert found.attention is not transformer_engine.attention_by_te and found.report[0][2].startswith(
            f"transformer_engine: {why}"
        )
    monkeypatch.setattr(transformer_engine, "is_te_installed", lambda: False)
    assert select_kernels(wanted).report[0] == (
        "attention",
        "fused",
        "transformer_engine: the package transformer_engine is not installed (github.com/NVIDIA/TransformerEngine)",
    )
    with pytest.raises(ConfigError, match="--attention-backend transformer_engine cannot be used: .* is not installed"):
        select_kernels(GPU, {"attention": "transformer_engine"})


@pytest.mark.parametrize("version", [2, 3])
def test_the_leak_probe_finds_documents_that_a_package_does_not_keep_apart(
    packages: None, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.run_of(tiny.config(reset_attention_mask=True, reset_position_ids=True, window_size="5,0"))
    kernel = partial(flash_attn.attention_by_flash_attn, version=version)
    require_causal_attention(replace(run, kernels=replace(run.kernels, attention=kernel)))
    monkeypatch.setattr(
        flash_attn,
        "document_starts_from_ids",
        lambda documents, _: PackedDocumentStarts(
            torch.tensor([0, documents.numel()], dtype=torch.int32), documents.numel(), documents.numel()
        ),
    )
    with pytest.raises(ConfigError, match="lets tokens leak"):
        require_causal_attention(replace(run, kernels=replace(run.kernels, attention=kernel)))


def test_why_a_package_cannot_serve(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(name: str, **changes: object) -> str:
        return next(candidate.unsupported_reason for candidate in CANDIDATES if candidate.name == name)(
            replace(GPU, **changes)
        )

    for name in ("flash_attn_2", "flash_attn_3"):
        assert why(name, documents=True, window=True, softcap=True) == ""
        assert (
            why(name, device="cpu") == "it needs a CUDA device"
            and why(name, dtype=torch.float32) == "it needs fp16 or bf16"
        )
        assert (
            why(name, padding=True) == "padding is left out by a mask tensor"
            and why(name, sinks=True) == "it has no sinks"
        )
        assert why(name, biased_scores=True) == "it adds nothing to scores"
        assert why(name, head_sizes=(288, 288)) == "its heads have at most 256 sizes, not 288"
    assert (
        why("flash_attn_2", attention_dropout=0.1) == ""
        and why("flash_attn_3", attention_dropout=0.1) == "version 3 has no dropout"
    )
    assert (
        why("flash_attn_2", head_sizes=(192, 128)) == "it needs values of the size of keys"
        and why("flash_attn_3", head_sizes=(192, 128)) == ""
    )
    monkeypatch.setattr(flash_attn, "is_hopper_gpu", lambda: False)
    assert why("flash_attn_3") == "version 3 is for Hopper GPUs" and why("flash_attn_2") == ""
    monkeypatch.setattr(flash_attn, "is_flash_attn_installed", lambda version: False)
    assert why("flash_attn_2").startswith("the package flash_attn is not installed")
    assert why("cudnn") == "" and why("cudnn", device="cpu") == "it needs a CUDA device"
    assert (
        why("cudnn", documents=True)
        == "documents are kept apart by a mask tensor, which torch's cuDNN backend does not take"
    )
    assert why("cudnn", head_sizes=(192, 192)) == "its heads have at most 128 sizes, not 192"
    assert why("flex", documents=True, softcap=True, sinks=True, padding=True, dtype=torch.float32) == ""
    assert (
        why("flex", device="cpu") == "compiled for a CPU it has no backward pass"
        and why("flex", attention_dropout=0.1) == "it has no dropout"
    )


def test_what_was_not_measured_is_taken_only_when_it_is_asked_for(packages: None) -> None:
    assert select_kernels(GPU).attention is fused.attention_by_sdpa
    chosen = select_kernels(GPU, {"attention": "flash_attn_3"}).attention
    assert (chosen.func, chosen.keywords) == (flash_attn.attention_by_flash_attn, {"version": 3})
    assert select_kernels(GPU, {"attention": "cudnn"}).attention is fused.cudnn_attention
    with pytest.raises(
        ConfigError,
        match="--attention-backend flash_attn_3 cannot be used: flash_attn_3: it has no sinks; choose another",
    ):
        select_kernels(replace(GPU, sinks=True), {"attention": "flash_attn_3"})


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("scores", [*SCORES, "sinks", "bias"])
@pytest.mark.parametrize("mask", [*MASKS, "padding", "places"])
def test_flex_attention_is_told_what_the_reference_computes(
    mask: str, scores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = torch.ones(B, S, dtype=torch.bool)
    padding[1, 7:] = False
    more = {
        "padding": AttentionMaskSpec(causal=False, padding=padding),
        "places": AttentionMaskSpec(window=(4, 0), query_places=torch.tensor([1, 4, 9]), key_places=torch.arange(S)),
    }
    found = {
        **SCORES,
        "sinks": AttentionScoreModifiers(sink=torch.randn(N, dtype=torch.float64).requires_grad_()),
        "bias": AttentionScoreModifiers(bias=torch.randn(1, N, 3 if mask == "places" else S, S, dtype=torch.float64)),
    }[scores]
    one = {**MASKS, **more}[mask]
    inputs = heads(3 if mask == "places" else S) + ([found.sink] if scores == "sinks" else [])
    expected = with_gradients(lambda q, k, v, *_: reference.softmax_attention(q, k, v, one, 0.0, found), *inputs)
    monkeypatch.setattr(
        flex, "compiled_flex_functions", lambda: (flex_stand_in.flex_attention, flex_stand_in.create_block_mask)
    )
    check(
        with_gradients(lambda q, k, v, *_: flex.attention_by_flex(q, k, v, one, 0.0, found), *inputs), expected, 1e-12
    )
    if (mask, scores) not in (("window of documents", "both"), ("places", "sinks"), ("padding", "bias")):
        return  # torch's own is slow when it is not compiled, and has no gradients on a CPU
    with torch.no_grad():
        monkeypatch.setattr(flex, "compiled_flex_functions", lambda: (flex_attention, create_block_mask))
        q, k, v = (each.detach() for each in inputs[:3])
        torch.testing.assert_close(flex.attention_by_flex(q, k, v, one, 0.0, found), expected[0], rtol=1e-6, atol=1e-6)
