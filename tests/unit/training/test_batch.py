"""A microbatch of a dataset: what the layers are told of it, and that packed conversations do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.data import DataConfig, SFTDataConfig
from megatron.core.datasets.blend import build_gpt_datasets
from megatron.core.datasets.chat import ChatDataset
from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.samplers import collate
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.build import NullTokenizer
from megatron.training.data.sample_order import stages_read_data
from megatron.training.loader import iterate_split_microbatches
from megatron.training.state.batch import Batch, masked_loss_sum
from tests.helpers import tiny

CPU = torch.device("cpu")
LAYOUTS = [{}, {"position_embedding_type": "rope", "normalization": "RMSNorm", "attention_backend": "unfused"}]


class Talks:
    """Conversations of given ids, the second half of each being the answer."""

    prefix = "talks"

    def __init__(self, talks: list[list[int]]) -> None:
        self.talks = [
            np.array([token if place >= len(ids) // 2 else ~token for place, token in enumerate(ids)]) for ids in talks
        ]
        self.sequence_lengths = np.array([len(ids) for ids in talks])
        self.document_indices = np.arange(len(talks) + 1)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        return self.talks[sequence][offset : None if length is None else offset + length]


def samples_of(talks: list[list[int]], size: int = 16) -> ChatDataset:
    return ChatDataset(Talks(talks), SplitRequest(range(len(talks)), None, "train"), sequence_length=size, seed=1)


class Logits:
    """The logits of one tiny GPT for samples, through a batch. [s, v]"""

    def __init__(self, **changes: Any) -> None:
        run = tiny.run_of(tiny.config(1, sft=True, fp64=True, **changes))
        self.data = run.config.data
        self.model = GPTModel(stage_specs_of_run(run.config)[0], run.layer_build_context).materialize(3)

    def __call__(self, sample: dict[str, np.ndarray]) -> torch.Tensor:
        batch = Batch.from_arrays(collate([sample]), CPU, positions=self.data.restarts_positions)
        with torch.no_grad():
            logits = self.model(ids=batch.tokens, hidden=None, positions=batch.positions, documents=batch.documents)
        return logits.reshape(16, -1)


@pytest.mark.parametrize("changes", LAYOUTS, ids=["gpt", "rope"])
def test_a_token_of_one_packed_conversation_changes_no_logit_of_another(changes: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    talks = [random.integers(1, 49, size).tolist() for size in (7, 5, 6)]  # 6 + 4 + 5 places of 16
    data = samples_of(talks)
    assert len(data) == 1
    spans = data.token_sources(0)
    logits_of = Logits(**changes)
    base = logits_of(data[0])
    for span in spans:
        for place in range(span.length):
            altered = [list(talk) for talk in talks]
            altered[span.sequence][place] = altered[span.sequence][place] % 48 + 1
            found = logits_of(samples_of(altered)[0])
            moved = (found - base).abs().amax(dim=1) > 1e-12
            # Its own place and what follows in its own conversation, and nothing else: not the padding either.
            assert moved[span.start + place : span.start + span.length].all()
            assert moved.sum() == span.length - place


@pytest.mark.parametrize("changes", LAYOUTS, ids=["gpt", "rope"])
def test_a_packed_conversation_has_the_logits_that_it_has_alone(changes: dict[str, Any]) -> None:
    random = np.random.default_rng(1)
    talks = [random.integers(1, 49, size).tolist() for size in (7, 5, 6)]
    data = samples_of(talks)
    logits_of = Logits(**changes)
    together = logits_of(data[0])
    for span in data.token_sources(0):
        alone = logits_of(samples_of([talks[span.sequence]])[0])
        torch.testing.assert_close(
            together[span.start : span.start + span.length], alone[: span.length], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(
    "changes, told, apart",
    [
        ({}, False, False),
        ({"reset_position_ids": True}, True, False),
        ({"reset_attention_mask": True}, False, True),
        ({"dataloader_inter_document_masking": True}, True, True),
        ({"sft": True}, True, True),
    ],
)
def test_layers_are_told_positions_and_documents_when_the_settings_ask(
    changes: dict[str, Any], told: bool, apart: bool
) -> None:
    run = tiny.run_of(tiny.config(1, **changes))
    train, _, _ = build_gpt_datasets(
        run.config.data,
        sequence_length=16,
        seed=1,
        train_samples=8,
        valid_samples=0,
        test_samples=0,
        tokenizer=run.tokenizer,
    )
    batch = next(iterate_split_microbatches(run, train, consumed_samples=0, reads=True))
    assert (batch.positions is not None, batch.documents is not None) == (told, apart)
    middle = stage_specs_of_run(tiny.config(4, pipeline_model_parallel_size=4, **changes))[1]
    assert stages_read_data(run.config, [middle]) == (told or apart), (
        "a stage between the ends reads what its layers are told"
    )


@pytest.mark.parametrize(
    "changes, reads",
    [
        ({"moe_aux_loss_coeff": (0.1,)}, True),
        ({"moe_z_loss_coeff": 0.1}, True),
        ({}, True),
        ({"moe_aux_loss_coeff": (0.1,), "calculate_per_token_loss": False}, True),
        ({"moe_aux_loss_coeff": (0.1,), "moe_layer_freq": "[1]+[0]*3"}, False),
    ],
)
def test_a_stage_between_the_ends_reads_which_tokens_its_experts_count(changes: dict[str, Any], reads: bool) -> None:
    settings = tiny.config(4, pipeline_model_parallel_size=4, num_experts=4, **changes)
    assert stages_read_data(settings, [stage_specs_of_run(settings)[1]]) == reads


def cu_seqlens(tokens: list[int], eod: int) -> list[int]:
    """Where documents begin and, last, the end: the boundaries that kernels for variable lengths take."""
    return sorted({0, len(tokens), *(place + 1 for place, token in enumerate(tokens) if token == eod)})


def test_inter_document_masking_is_documents_apart_with_positions_of_their_own() -> None:
    tokenizer = NullTokenizer(49)
    train, _, _ = build_gpt_datasets(
        DataConfig(mock_data=True, dataloader_inter_document_masking=True),
        sequence_length=3000,
        seed=1,
        train_samples=20,
        valid_samples=0,
        test_samples=0,
        tokenizer=tokenizer,
    )
    boundaries = 0
    for index in range(20):
        sample = train[index]
        edges = cu_seqlens(sample["tokens"].tolist(), tokenizer.eod)
        lengths = [last - first for first, last in zip(edges, edges[1:])]
        assert sample["position_ids"].tolist() == [place for length in lengths for place in range(length)]
        assert sample["document_ids"].tolist() == [
            number for number, length in enumerate(lengths) for _ in range(length)
        ]
        boundaries += len(lengths) - 1
    assert boundaries > 10


def test_the_loss_is_a_sum_over_the_tokens_that_count() -> None:
    losses, mask = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    total, count, report = masked_loss_sum(losses, mask)
    assert (total.item(), count.item()) == (37.0, 3.0)
    assert report["lm loss"].tolist() == [37.0, 3.0]


def test_a_run_may_ask_for_conversations_in_its_settings() -> None:
    assert DataConfig(chat=SFTDataConfig(sft=True)).separates_documents and not DataConfig().restarts_positions
