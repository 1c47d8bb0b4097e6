"""Log-likelihoods and continuations: those of transformers, whatever the batch, the layout and the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.evaluation.likelihood import (
    ContinuationLikelihood,
    EvaluationBatchLimits,
    GenerationPrompt,
    LoglikelihoodRequest,
    continuation_loglikelihoods,
    generate_without_kv_cache,
)
from megatron.inference.sampling import SamplingParams
from megatron.megatron_lm.checkpoint.export import write_legacy_checkpoint
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.inference_model import GPT, load_network
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.unit.megatron_lm.megatron_files import V2, Whole

published = pytest.importorskip("tests.unit.evaluation.published", reason="transformers is not installed")

LENGTH, IDS = published.LENGTH, 700  # ids that requests are made of
SIZES = (EvaluationBatchLimits(1), EvaluationBatchLimits(5), EvaluationBatchLimits(100, 64))


def requests() -> list[LoglikelihoodRequest]:
    """Requests of many lengths, some longer than the network, some that share an input."""
    random = np.random.default_rng(5)
    found = []
    for number in range(20):
        ids = tuple(random.integers(0, IDS, int(random.integers(2, LENGTH + 9))).tolist())
        size = min(int(random.integers(1, len(ids))), LENGTH)
        found.append(LoglikelihoodRequest(ids[:-size], ids[-size:]))
        if number % 4 == 0:
            found.append(LoglikelihoodRequest(found[-1].context, (*found[-1].continuation[:-1], number)))
    return found


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A published model: its folder, and transformers' own."""
    path = tmp_path_factory.mktemp(request.param)
    return str(path), published.write(request.param, path)


@torch.no_grad()
def theirs(model: Any, asked: Sequence[LoglikelihoodRequest]) -> list[ContinuationLikelihood]:
    """The definition, a request at a time, by transformers."""
    found = []
    for request in asked:
        ids = (request.context + request.continuation)[-(LENGTH + 1) :]
        size = len(request.continuation)
        scores = model(torch.tensor([ids[:-1]])).logits[0, -size:].log_softmax(dim=-1)
        target = torch.tensor(ids[-size:])
        found.append(
            ContinuationLikelihood(
                float(scores[torch.arange(size), target].sum()), bool((scores.argmax(dim=-1) == target).all())
            )
        )
    return found


def same(found: Sequence[ContinuationLikelihood], expected: Sequence[ContinuationLikelihood]) -> None:
    assert [answer.greedy for answer in found] == [answer.greedy for answer in expected]
    assert [answer.loglikelihood for answer in found] == pytest.approx(
        [answer.loglikelihood for answer in expected], rel=2e-5, abs=2e-5
    )


def likely(model: Any) -> list[LoglikelihoodRequest]:
    """Requests whose continuations are what the model says, or almost."""
    found = []
    for number in range(4):
        context = (number + 1, 2 * number + 3)
        with torch.no_grad():
            first = int(model(torch.tensor([context])).logits[0, -1].argmax())
            second = int(model(torch.tensor([(*context, first)])).logits[0, -1].argmax())
        found += [LoglikelihoodRequest(context, (first, second)), LoglikelihoodRequest(context, (first, second + 1))]
    return found


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_loglikelihoods_are_those_of_transformers_in_any_batch(
    folder: tuple[str, Any], size: EvaluationBatchLimits
) -> None:
    loaded = load_network(folder[0], GPT)
    asked = requests() + likely(folder[1])
    expected = theirs(folder[1], asked)
    assert sum(answer.greedy for answer in expected) == 4, "some must be the likeliest"
    same(continuation_loglikelihoods(loaded.stages, asked, max_length=LENGTH, size=size), expected)


def asked_on_ranks(
    path: str, parallel: dict[str, int], size: EvaluationBatchLimits
) -> tuple[list[ContinuationLikelihood], list[list[int]]]:
    """On every rank: answers and continuations."""
    loaded = load_network(path, GPT, parallel=ParallelConfig(**parallel))
    return continuation_loglikelihoods(
        loaded.stages, requests(), max_length=LENGTH, size=size
    ), generate_without_kv_cache(loaded, prompts(), size=size)


def prompts() -> list[GenerationPrompt]:
    """Prompts of several lengths, two of them equal; greedy ones and draws."""
    texts = [(5, 6, 7), (9,), (11, 12, 13, 14, 15), (5, 6, 7), (301, 302)]
    return [
        GenerationPrompt(
            ids,
            6 - number % 2,
            lambda new: False,
            SamplingParams(0.0) if number < 3 else SamplingParams(1.0, top_k=50),
            number,
        )
        for number, ids in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {}),
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        (4, {"pipeline_model_parallel_size": 2}),
    ],
    ids=str,
)
def test_every_rank_of_every_layout_says_the_same(
    world: Worlds, folder: tuple[str, Any], ranks: int, parallel: dict[str, int]
) -> None:
    alone = asked_on_ranks(folder[0], {}, EvaluationBatchLimits(1))
    for answers, texts in world(ranks).run(asked_on_ranks, folder[0], parallel, EvaluationBatchLimits(3)):
        same(answers, alone[0])
        assert texts == alone[1]


def test_fewer_requests_than_data_ranks_are_answered(world: Worlds, folder: tuple[str, Any]) -> None:
    found = world(4).run(one_request, folder[0])
    assert len(found) == 4 and all(answers == found[0] and len(answers) == 1 for answers in found)


def one_request(path: str) -> list[ContinuationLikelihood]:
    """On every rank: one answer."""
    return continuation_loglikelihoods(
        load_network(path, GPT).stages, requests()[:1], max_length=LENGTH, size=EvaluationBatchLimits(8)
    )


def test_the_likeliest_continuation_is_that_of_transformers(folder: tuple[str, Any]) -> None:
    loaded = load_network(folder[0], GPT)
    for prompt, found in zip(
        prompts()[:3], generate_without_kv_cache(loaded, prompts()[:3], size=EvaluationBatchLimits(3))
    ):
        with torch.no_grad():
            expected = folder[1].generate(
                torch.tensor([prompt.ids]),
                attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.int64),
                max_new_tokens=prompt.num_tokens,
                do_sample=False,
            )[0, len(prompt.ids) :]
        assert found == expected.tolist()


def test_a_continuation_ends_when_it_is_told_to(folder: tuple[str, Any]) -> None:
    loaded = load_network(folder[0], GPT)
    whole = generate_without_kv_cache(
        loaded, [GenerationPrompt((5, 6, 7), 8, lambda new: False)], size=EvaluationBatchLimits(1)
    )[0]
    told = GenerationPrompt((5, 6, 7), 8, lambda new: len(new) == 2)
    assert (
        generate_without_kv_cache(
            loaded, [told, GenerationPrompt((9,), 1, lambda new: False)], size=EvaluationBatchLimits(2)
        )[0]
        == whole[:2]
    )


def trained(folder: str, changes: dict[str, Any]) -> None:
    """On every rank: save a tiny network."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    Checkpointer(
        tiny.trainer_of(
            tiny.run_of(
                tiny.config(size, save=folder, tokenizer_type="NullTokenizer", vocab_size=tiny.VOCABULARY, **changes)
            )
        )
    ).save()


@pytest.mark.parametrize(
    ("writers", "written", "ranks", "parallel"),
    [
        (2, {"tensor_model_parallel_size": 2}, 2, {"pipeline_model_parallel_size": 2}),
        (1, {"make_vocab_size_divisible_by": 1}, 4, {"tensor_model_parallel_size": 4}),
    ],
    ids=str,
)  # 50 rows, of which 4 ranks hold 13 each
def test_our_own_checkpoint_says_the_same_under_another_layout_than_wrote_it(
    world: Worlds, tmp_path: Path, writers: int, written: dict[str, int], ranks: int, parallel: dict[str, int]
) -> None:
    if writers == 1:
        trained(str(tmp_path), written)
    else:
        world(writers).run(trained, str(tmp_path), written)
    asked = [LoglikelihoodRequest((3, 4, 5), (6, 7)), LoglikelihoodRequest((8,), (9,))]
    alone = continuation_loglikelihoods(
        load_network(str(tmp_path), GPT).stages, asked, max_length=16, size=EvaluationBatchLimits(2)
    )
    for found in world(ranks).run(ask_ours, str(tmp_path), asked, parallel):
        same(found, alone)


def ask_ours(path: str, asked: list[LoglikelihoodRequest], parallel: dict[str, int]) -> list[ContinuationLikelihood]:
    """On every rank: answers under a layout."""
    return continuation_loglikelihoods(
        load_network(path, GPT, parallel=ParallelConfig(**parallel)).stages,
        asked,
        max_length=16,
        size=EvaluationBatchLimits(1),
    )


def test_megatrons_own_files_say_the_same_once_they_are_given_a_tokenizer(tmp_path: Path) -> None:
    trained(str(tmp_path / "ours"), {})
    write_legacy_checkpoint(open_checkpoint(tmp_path / "ours"), tmp_path / "theirs")
    found, tokenizer = [], {"tokenizer_type": "NullTokenizer", "vocab_size": tiny.VOCABULARY}
    for folder, given in (("ours", {}), ("theirs", tokenizer)):
        loaded = load_network(str(tmp_path / folder), GPT, tokenizer=given)
        assert loaded.config.model.true_vocab_size == tiny.VOCABULARY
        found.append(
            continuation_loglikelihoods(
                loaded.stages, [LoglikelihoodRequest((3, 4, 5), (6, 7))], max_length=16, size=EvaluationBatchLimits(1)
            )
        )
    same(*found)
    with pytest.raises(ConfigError, match="no --tokenizer-type is given"):
        load_network(str(tmp_path / "theirs"), GPT)


def test_rows_that_pad_megatrons_files_are_no_ids(tmp_path: Path) -> None:
    whole = Whole(heads=2, groups=2, size=1)  # whose MLP has the size that follows from the others
    whole.write(tmp_path, V2, version=3.0, tp=2)
    loaded = load_network(str(tmp_path), GPT, tokenizer={"tokenizer_type": "NullTokenizer", "vocab_size": 10})
    assert loaded.config.model.true_vocab_size == 10
    weights = loaded.stages[0].embedding.word_embeddings.weight
    assert torch.equal(weights[:10], whole.ours()["embedding.word_embeddings.weight"])


def test_weights_keep_their_format_unless_another_is_asked_for(tmp_path: Path) -> None:
    trained(str(tmp_path), {"bf16": True})
    assert load_network(str(tmp_path), GPT).config.precision.param_dtype_name == "bfloat16"
    loaded = load_network(str(tmp_path), GPT, dtype="float64")
    assert {param.dtype for stage in loaded.stages for param in stage.parameters()} == {torch.float64}
    with pytest.raises(ConfigError, match="dtype int8 is none of auto, float32"):
        load_network(str(tmp_path), GPT, dtype="int8")


def test_what_does_not_fit_is_refused(folder: tuple[str, Any], tmp_path: Path) -> None:
    trained(str(tmp_path), {"architecture": "bert"})
    with pytest.raises(CheckpointError, match="holds a BERT; what is asked for is a GPT-like model"):
        load_network(str(tmp_path), GPT)
    with pytest.raises(ConfigError, match="1 ranks are not a multiple of --tensor-model-parallel-size 2"):
        load_network(folder[0], GPT, parallel=ParallelConfig(tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match="the tokenizer has 50000 ids, and the embedding of"):
        load_network(folder[0], GPT, tokenizer={"tokenizer_type": "NullTokenizer", "vocab_size": 50000})
    with pytest.raises(CheckpointError, match="was trained with another tokenizer"):
        load_network(str(ours(tmp_path / "gpt")), GPT, tokenizer={"tokenizer_type": "NullTokenizer", "vocab_size": 12})


def ours(path: Path) -> Path:
    """A tiny GPT's folder."""
    trained(str(path), {})
    return path
