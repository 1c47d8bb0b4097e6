"""A network whose layers keep states, behind HTTP: asked at once, as a conversation, as a stream, and from a beginning that is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.inference.server.chat import ChatPromptEncoder
from tests.unit.inference.clients import POSITIONS, Running, serving
from tests.unit.inference.serving import HYBRID, engine_of, slowly, stages_on


@cache
def network() -> GPTModel:
    """A hybrid whose words are bytes."""
    return stages_on(1, 257, max_position_embeddings=POSITIONS, seq_length=POSITIONS, **HYBRID)[0]


def text_of(ids: tuple[int, ...] | list[int], count: int) -> str:
    """The likeliest continuation of ids, the whole text computed anew for every token."""
    return ByteTokenizer().detokenize(slowly(network(), tuple(ids), count)[0])


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(engine_of(network(), ByteTokenizer(), block=8, tokens=24, together=4, sharing=True)) as running:
        yield running


def test_a_conversation_is_answered_whole_and_as_a_stream_from_the_states_of_the_first(server: Running) -> None:
    messages = [{"role": "user", "content": "What is kept of a text whose layers have states?"}]
    asked = {"messages": messages, "max_tokens": 12, "temperature": 0}
    ids = ChatPromptEncoder(ByteTokenizer(), "chatml").encode_messages(messages)
    whole = server.converse(**asked).json
    assert whole["choices"][0]["message"]["content"] == text_of(ids, 12)
    stream = server.converse(**asked, stream=True, stream_options={"include_usage": True}).text
    lines = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for line in lines for choice in line["choices"]]
    assert "".join(deltas) == text_of(ids, 12) and sum(map(bool, deltas)) > 1
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert lines[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(ids) - 1) // 8 * 8


def test_a_longer_text_goes_on_from_a_kept_state_and_its_scores_are_those_of_whole_passes(server: Running) -> None:
    beginning = "States pass from chunk to chunk. "
    server.complete(prompt=beginning, max_tokens=1, temperature=0)
    found = server.complete(prompt=beginning + "And then?", max_tokens=3, temperature=0, logprobs=1).json
    ids, logprobs = slowly(network(), tuple((beginning + "And then?").encode()), 3)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 32  # of 33: whole blocks
    assert found["choices"][0]["text"] == ByteTokenizer().detokenize(ids)
    assert found["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-8)
