"""Packed documents and windows by torch's attention of sequences of different lengths, against the masked formula; and where documents begin."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.kernels.choice import table
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.startup_check import select_kernels_with_trials
from megatron.core.kernels.choice.table import CANDIDATES, KernelRequirements, select_kernels
from megatron.core.kernels.ops import flex, fused, packed_document_starts, reference, varlen
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.packed_document_starts import (
    PackedDocumentStarts,
    cached_packed_document_starts,
    document_starts_from_ids,
    memoize_packed_document_starts,
)
from megatron.training.state.batch import Batch
from tests.helpers import flex_stand_in, tiny
from tests.unit.kernels.test_attention_packages import DOCUMENTS, MASKS, B, S, heads
from tests.unit.kernels.test_ops import check, with_gradients
from tests.without_gpu import varlen_stand_in

CPU = torch.device("cpu")
PACKED = KernelRequirements(device="cuda", dtype=torch.bfloat16, documents=True)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A model of torch's function in plain torch in its place; what it was called with."""
    calls: list[dict[str, Any]] = []

    @wraps(varlen._LIBRARY.varlen_attn)
    def noted(*given: Any, **how: Any) -> Tensor:
        names = list(inspect.signature(varlen_stand_in.varlen_attn).parameters)
        calls.append({**dict(zip(names, given, strict=False)), **how})
        return varlen_stand_in.varlen_attn(*given, **how)

    monkeypatch.setattr(varlen._LIBRARY, "varlen_attn", noted)
    yield calls


def test_torch_2_11_is_given_groups_without_the_flag_that_later_ones_want(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_2_11(*given: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        return varlen_stand_in.varlen_attn(*given, scale=scale, window_size=window_size, enable_gqa=True)

    with monkeypatch.context() as patched:
        patched.setattr(varlen._LIBRARY, "varlen_attn", of_2_11)
        spec = importlib.util.spec_from_file_location("varlen_of_2_11", varlen.__file__)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # it looks once, when it is imported
        q, k, v = heads()
        assert q.shape[2] != k.shape[2]
        mask = MASKS["documents"] if "documents" in MASKS else AttentionMaskSpec()
        torch.testing.assert_close(
            module.attention_by_varlen(q, k, v, mask), reference.softmax_attention(q, k, v, mask)
        )


def no_mask(*_: Any) -> Tensor:
    raise AssertionError("a mask of all pairs is made")


@pytest.mark.parametrize(
    "scores", [AttentionScoreModifiers(), AttentionScoreModifiers(scale=0.7)], ids=["plain", "scaled"]
)
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_the_masked_formula_forward_and_backward_without_a_mask(
    library: list[dict[str, Any]], mask: str, scores: AttentionScoreModifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = with_gradients(lambda *qkv: reference.softmax_attention(*qkv, MASKS[mask], 0.0, scores), *heads())
    monkeypatch.setattr(AttentionMaskSpec, "as_bool_tensor", no_mask)
    check(
        with_gradients(lambda *qkv: varlen.attention_by_varlen(*qkv, MASKS[mask], 0.0, scores), *heads()),
        expected,
        1e-12,
    )
    (call,) = library
    assert call["key"].shape[1] == 2 and call["query"].shape[1] == 4, "keys of groups are not repeated"
    assert call["cu_seq_q"] is call["cu_seq_k"] and call["cu_seq_q"].dtype == torch.int32
    whole = MASKS[mask].documents is None
    assert call["cu_seq_q"].tolist() == ([0, S, 2 * S] if whole else [0, 3, 5, 10, 11, 12, 19, 22])


def test_windows_are_told_in_its_words(library: list[dict[str, Any]]) -> None:
    for mask, told in (
        (AttentionMaskSpec(), (-1, 0)),
        (AttentionMaskSpec(causal=False), (-1, -1)),
        (AttentionMaskSpec(window=(3, 0)), (3, 0)),
        (AttentionMaskSpec(window=(2, -1)), (2, 0)),
        (AttentionMaskSpec(causal=False, window=(2, 1)), (2, 1)),
    ):
        varlen.attention_by_varlen(*heads(), mask)
        assert library[-1]["window_size"] == told


def test_masks_of_generation_are_left_to_torch(library: list[dict[str, Any]]) -> None:
    padding = torch.ones(B, S, dtype=torch.bool)
    padding[0, :3] = False
    for mask, queries in (
        (AttentionMaskSpec(padding=padding), S),
        (AttentionMaskSpec(), 3),
        (AttentionMaskSpec(query_places=torch.arange(S - 3, S)), 3),
        (AttentionMaskSpec(documents=DOCUMENTS, query_documents=DOCUMENTS[:, -3:]), 3),
    ):
        q, k, v = heads(queries)
        torch.testing.assert_close(
            varlen.attention_by_varlen(q, k, v, mask),
            reference.softmax_attention(q, k, v, mask),
            rtol=1e-12,
            atol=1e-12,
        )
    assert not library


def test_documents_begin_where_their_number_changes_and_with_every_row() -> None:
    assert document_starts_from_ids(DOCUMENTS).places.tolist() == [0, 3, 5, 10, 11, 12, 19, 22]
    assert document_starts_from_ids(torch.zeros(2, 3, dtype=torch.long)).places.tolist() == [0, 3, 6]


def test_a_batch_counts_its_documents_on_the_host_and_masks_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((B, S), dtype=np.int64)
    arrays = {name: rows for name in ("tokens", "labels", "loss_mask", "position_ids")}
    batch = Batch.from_arrays({**arrays, "document_ids": DOCUMENTS.numpy()}, CPU, positions=True)
    monkeypatch.setattr(packed_document_starts, "_cu_seqlens_of_document_ids", no_mask)
    assert batch.documents is not None
    known = cached_packed_document_starts(batch.documents)
    assert known is not None and (known.longest, known.tokens) == (7, 22)
    assert known.places.tolist() == [0, 3, 5, 10, 11, 12, 19, 22] and known.places.dtype == torch.int32
    build = tiny.run_of(tiny.config()).layer_build_context
    mask = build.causal_mask(torch.empty(S, B, 1), batch.documents)
    assert mask.starts is known
    torch.testing.assert_close(
        varlen.attention_by_varlen(*heads(), mask), reference.softmax_attention(*heads(), mask), rtol=1e-12, atol=1e-12
    )
    assert cached_packed_document_starts(DOCUMENTS.clone()) is None and cached_packed_document_starts(None) is None
    longer = replace(mask, documents=DOCUMENTS.repeat(2, 1))
    with pytest.raises(AssertionError):
        document_starts_from_ids(longer.documents, longer.starts)


def test_starts_are_forgotten_with_the_batch() -> None:
    there = DOCUMENTS.clone()
    memoize_packed_document_starts(there, DOCUMENTS.numpy())
    before = len(packed_document_starts._packed_document_starts_cache())
    del there
    assert len(packed_document_starts._packed_document_starts_cache()) < before


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"device": "cpu"}, "it needs a CUDA device"),
        ({"dtype": torch.float32}, "it needs fp16 or bf16"),
        ({"head_sizes": (192, 128)}, "it needs values of the size of keys"),
        ({"head_sizes": (512, 512)}, "its heads have at most 256 sizes, not 512"),
        ({"attention_dropout": 0.1}, "it has no dropout"),
        ({"padding": True}, "padding is left out by a mask tensor"),
        ({"softcap": True}, "it has no cap on scores"),
        ({"sinks": True}, "it has no sinks"),
        ({"biased_scores": True}, "it adds nothing to scores"),
        ({"pieces": True}, "sequences are cut over context ranks"),
        ({"recorded": True}, "the number of documents changes, and that of a recorded layer's sequences does not"),
    ],
)
def test_why_it_cannot_serve(changes: dict[str, Any], reason: str) -> None:
    assert select_kernels(PACKED, {"attention": "varlen"}).attention is varlen.attention_by_varlen
    with pytest.raises(ConfigError, match=f"--attention-backend varlen cannot be used: varlen: {reason}"):
        select_kernels(replace(PACKED, **changes), {"attention": "varlen"})
    assert select_kernels(replace(PACKED, documents=False, recorded=True), {"attention": "varlen"})


def test_an_older_torch_has_no_windows_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="torch has it with windows and groups from 2.11 on"):
        select_kernels(PACKED, {"attention": "varlen"})


def test_it_is_the_default_of_documents_and_windows_once_it_passed_its_trial(
    library: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tuple(replace(one, unsupported_reason=lambda _: "") if one.name == "varlen" else one for one in CANDIDATES)
    for changes, name in (
        ({}, "fused"),
        ({"reset_attention_mask": True}, "varlen"),
        ({"window_size": "5,0"}, "varlen"),
    ):
        config = tiny.config(**changes)
        kernels = select_kernels_with_trials(config, kernel_requirements(config, CPU), CPU, candidates=here).kernels
        assert dict((op, one) for op, one, _ in kernels.report)["attention"] == name
    assert library
    monkeypatch.setattr(
        varlen,
        "document_starts_from_ids",
        lambda rows, _: PackedDocumentStarts(torch.tensor([0, rows.numel()]).int(), rows.numel(), 0),
    )
    config = tiny.config(reset_attention_mask=True)
    chosen = select_kernels_with_trials(config, kernel_requirements(config, CPU), CPU, candidates=here)
    assert (
        chosen.kernels.attention is fused.attention_by_sdpa
        and "--attention-backend varlen is no default here" in chosen.failures[0]
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("sound", [True, False])
def test_capped_scores_are_left_to_flex_attention_once_it_passed_its_trial(
    sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = flex_stand_in.flex_attention if sound else lambda q, *_, **__: 1.1 * q
    monkeypatch.setattr(flex, "compiled_flex_functions", lambda: (kept, flex_stand_in.create_block_mask))
    here = tuple(replace(one, unsupported_reason=lambda _: "") if one.name == "flex" else one for one in CANDIDATES)
    config = tiny.config(attention_logit_softcap=2.0)
    chosen = select_kernels_with_trials(config, kernel_requirements(config, CPU), CPU, candidates=here)
    assert (
        chosen.kernels.attention is (flex.attention_by_flex if sound else fused.attention_by_sdpa)
        and len(chosen.failures) == 1 - sound
    )
    assert (
        select_kernels_with_trials(tiny.config(), KernelRequirements(), CPU, candidates=here).kernels.attention
        is fused.attention_by_sdpa
    )
    capped = KernelRequirements(device="cuda", dtype=torch.bfloat16, softcap=True, attention_dropout=0.1)
    assert select_kernels(capped).attention is fused.attention_by_sdpa, "it has no dropout"


def test_the_model_of_torchs_function_has_its_signature() -> None:
    library = inspect.signature(
        varlen._LIBRARY.varlen_attn
    ).parameters  # that of the function which the fixture replaces
    ours = list(inspect.signature(varlen_stand_in.varlen_attn).parameters)[:-1]
    assert list(library)[: len(ours)] == ours
    known = {
        name: default for name, default in varlen_stand_in.OPTIONS.items() if name in library or name != "enable_gqa"
    }
    assert {name: library[name].default for name in known} == known
