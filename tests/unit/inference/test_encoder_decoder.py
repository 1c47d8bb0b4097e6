"""A T5 says here what transformers' own `generate` says, and the same under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.models.t5 import T5Model
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference.encoder_decoder import EncoderDecoderEngine
from megatron.inference.requests import GenerationReply, GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.training.checkpoint.inference_model import ModelKind, load_network
from tests.helpers.world import Worlds
from tests.unit.inference.published_t5 import KINDS, WORDS, published
from tests.unit.inference.serving import greedy, prompts

NEW = 16


def decoder(folder: Path, changes: dict[str, int] | None = None, together: int = 3) -> EncoderDecoderEngine:
    """The same in our stages, on the CPU."""
    loaded = load_network(
        str(folder),
        ModelKind("t5", T5Model),
        tokenizer={"tokenizer_type": "NullTokenizer", "vocab_size": WORDS},
        parallel=ParallelConfig(**(changes or {})),
        device=torch.device("cpu"),
    )
    return EncoderDecoderEngine(
        loaded.stages, NullTokenizer(WORDS), InferenceConfig(inference_max_requests=together), start=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_published_programme_token_for_token(tmp_path: Path, kind: str) -> None:
    model, texts = published(tmp_path, kind), prompts(5, longest=30)
    replies = decoder(tmp_path).run(
        [greedy(text, NEW - index, ignore_eod=False, logprobs=True) for index, text in enumerate(texts)]
    )
    for index, (text, reply) in enumerate(zip(texts, replies, strict=True)):
        answer = model.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.int64),
            max_new_tokens=NEW - index,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ids = answer.sequences[0, 1:].tolist()
        ends = ids[-1] == WORDS - 1
        assert list(reply.ids) == (ids[:-1] if ends else ids) and (reply.reason == "stop") == ends
        expected = [
            float(scores[0].log_softmax(-1)[token]) for scores, token in zip(answer.scores, reply.ids, strict=False)
        ]
        assert [token.logprob for token in reply.tokens] == pytest.approx(expected, abs=2e-4)
    assert len({token for reply in replies for token in reply.ids}) > 8, "texts of few words prove little"


def answered(folder: Path, changes: dict[str, int]) -> list[GenerationReply] | None:
    """The replies to greedy and warm requests, on the first rank."""
    engine = decoder(folder, changes)
    if not engine.mesh.world.is_first:
        engine.run_as_follower()
        return None
    replies = engine.run(
        [
            GenerationRequest(
                text,
                4 + number,
                SamplingParams(0.8 * (number % 2), repetition_penalty=1.2),
                seed=number,
                ignore_eod=number > 2,
            )
            for number, text in enumerate(prompts(7, longest=20))
        ]
    )
    engine.close()
    return replies


@pytest.mark.parametrize(
    "size, changes",
    [(2, {"tensor_model_parallel_size": 2}), (4, {"tensor_model_parallel_size": 2})],
    ids=["tp2", "tp2 dp2"],
)
def test_the_answers_do_not_depend_on_the_layout(
    world: Worlds, tmp_path: Path, size: int, changes: dict[str, int]
) -> None:
    published(tmp_path, "later")
    found, expected = world(size).run(answered, tmp_path, changes)[0], answered(tmp_path, {})
    assert [(reply.ids, reply.reason) for reply in found] == [(reply.ids, reply.reason) for reply in expected]
    assert len({token for reply in expected for token in reply.ids}) > 8


def test_a_text_does_not_depend_on_what_else_is_decoded(tmp_path: Path) -> None:
    published(tmp_path, "first")
    requests = [
        GenerationRequest(text, 5 + number, SamplingParams(0.9), seed=number, ignore_eod=True)
        for number, text in enumerate(prompts(5))
    ]
    together, alone = decoder(tmp_path, together=5).run(requests), decoder(tmp_path, together=1).run(requests)
    assert [reply.ids for reply in together] == [reply.ids for reply in alone] and len(
        {reply.ids for reply in alone}
    ) == 5


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    published(tmp_path, "first")
    engine = decoder(tmp_path)
    for request, said in (
        (greedy((1,) * 65, 2), "longer than the 64 positions"),
        (greedy((1,), 65), "65 new tokens are more"),
        (greedy((50,), 2), "no ids of the network's 50"),
        (greedy((1,), 2, prompt_logprobs=True), "a T5 has none"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine.run([request])
