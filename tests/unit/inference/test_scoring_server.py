"""A reward model over HTTP: /pooling and /v1/score, their limits and errors; and the scores of the network itself as the reference."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.inference import score_service
from megatron.inference.requests import EngineBusyError, Ids
from megatron.inference.score_service import ScoreService
from megatron.inference.server.app import LOCAL
from megatron.inference.server.http_server import bind_socket
from megatron.inference.server.scoring import ScoringServing, build_scoring_app
from megatron.inference.server.serving import RequestLimits
from megatron.inference.service_thread import ServiceStoppedError
from tests.unit.inference.clients import Running, running, until

NAME, POSITIONS = "judge", 100
ENCODER = ConversationEncoder(ByteTokenizer(), "chatml")


def lengths(texts: Sequence[Ids]) -> list[float]:
    """A network whose scores are known."""
    return [len(ids) / 8 for ids in texts]


def ids_of(text: str | Sequence[Any]) -> Ids:
    if isinstance(text, str):
        return tuple(text.encode())
    (ids,) = ENCODER.encode_conversations([ENCODER.template.render_segments(text)])
    return tuple((ids ^ (ids >> 31)).tolist())


@contextmanager
def scoring(
    score: Callable[[Sequence[Ids]], list[float]] = lengths, *, token: str = "", writes_chat: bool = True, **limits: Any
) -> Iterator[Running]:
    """A server whose network gives the score of a function."""
    service = ScoreService(score)
    service.start()
    serving = ScoringServing(service, NAME, ids_of, POSITIONS, writes_chat, RequestLimits(**limits))
    app = build_scoring_app(serving, token=token, hosts=LOCAL)
    with running(app, service, bind_socket("127.0.0.1", 0)) as server:
        yield server


def talk(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def test_texts_conversations_and_answers_get_their_scores_in_order() -> None:
    with scoring() as server:
        answer = server.ask("POST", "/pooling", {"model": NAME, "input": ["four", "", "sixteen letters."]}).json
        assert [(one["index"], one["object"], one["data"]) for one in answer["data"]] == [
            (0, "pooling", [0.5]),
            (1, "pooling", [0.0]),
            (2, "pooling", [2.0]),
        ]
        assert (answer["object"], answer["model"], answer["usage"]["prompt_tokens"]) == ("list", NAME, 20)
        messages = server.ask("POST", "/pooling", {"messages": talk("2?", "4")}).json
        assert messages["data"][0]["data"] == [len(ids_of(talk("2?", "4"))) / 8]
        for path in ("/score", "/v1/score"):
            scored = server.ask("POST", path, {"text_1": "2?", "text_2": ["4", "four"]}).json
            assert [(one["object"], one["score"]) for one in scored["data"]] == [
                ("score", len(ids_of(talk("2?", text))) / 8) for text in ("4", "four")
            ]
        bounded = server.ask("POST", "/pooling", {"input": "four", "use_activation": True}).json
        assert bounded["data"][0]["data"] == pytest.approx([1 / (1 + math.exp(-0.5))])
        assert server.ask("GET", "/v1/models").json["data"][0]["id"] == NAME
        assert server.ask("GET", "/health").json == {"status": "ok"}
        assert 'finished_total{reason="score"} 9' in server.ask("GET", "/metrics").text
        assert server.complete(prompt="x").status == 404
    with scoring(writes_chat=False) as server:  # one text behind the other
        answer = server.ask("POST", "/v1/score", {"text_1": ["a", "bc"], "text_2": ["d", "ef"]}).json
        assert [one["score"] for one in answer["data"]] == [0.25, 0.5]
        assert "no chat template" in server.ask("POST", "/pooling", {"messages": talk("a", "b")}).text


WRONG: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "nothing": ("/pooling", {}, 400, "give either input, which is text, or messages"),
    "both": ("/pooling", {"input": "a", "messages": talk("a", "b")}, 400, "give either"),
    "no text": ("/pooling", {"input": [1, 2]}, 400, "input must be a string, or a list of strings"),
    "no texts": ("/pooling", {"input": []}, 400, "input must be a string, or a list of strings"),
    "another field": ("/pooling", {"inputs": "a"}, 400, "is input meant?"),
    "another model": ("/pooling", {"model": "other", "input": "a"}, 404, "this server has 'judge'"),
    "another encoding": ("/pooling", {"input": "a", "encoding_format": "base64"}, 400, 'can only be \\"float\\"'),
    "a long text": ("/pooling", {"input": "a" * 101}, 400, "101 tokens is more than the 100 positions"),
    "a text beyond the limit": ("/pooling", {"input": "a" * 61}, 413, "61 tokens; this server takes 60"),
    "many texts": ("/pooling", {"input": ["a"] * 5}, 413, "5 texts are asked for; this server takes 4"),
    "no role": ("/pooling", {"messages": [{"content": "a"}]}, 400, "role"),
    "half a surrogate pair": ("/pooling", {"input": "\ud800"}, 400, "a text cannot be read"),
    "no answer": ("/v1/score", {"text_1": "a"}, 400, "text_2 argument required"),
    "uneven": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_1 has 2 texts and text_2 has 1"),
}


def test_what_cannot_be_scored_gets_one_sentence() -> None:
    with scoring(prompts=4) as roomy, scoring(prompts=4, prompt_tokens=60, body_bytes=2000) as narrow:
        for name, (path, body, status, words) in WRONG.items():
            answer = (narrow if "limit" in name else roomy).ask("POST", path, body)
            assert (answer.status, words in answer.text) == (status, True), (name, answer.status, answer.text)
            assert answer.json["error"]["message"]
        assert narrow.ask("POST", "/pooling", {"input": "a" * 3000}).status == 413
        assert narrow.ask("POST", "/pooling", b"{").status == 400
        assert narrow.ask("POST", "/pooling", b"{}", {"Content-Type": "text/plain"}).status == 415
        assert narrow.ask("POST", "/pooling", {"input": "still there"}).status == 200
    with scoring(token="secret") as server:
        assert server.ask("POST", "/pooling", {"input": "a"}).status == 401
        shown = {"Authorization": "Bearer secret"}
        assert server.ask("POST", "/pooling", {"input": "a"}, shown).status == 200
        assert server.ask("GET", "/health").status == 200
    with scoring(lambda texts: [float("nan")] * len(texts)) as server:
        answer = server.ask("POST", "/pooling", {"input": "a"})
        assert (answer.status, "gives no number" in answer.text) == (500, True)


def test_texts_that_wait_are_scored_together_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, seen = threading.Event(), []

    def slow(texts: Sequence[Ids]) -> list[float]:
        seen.append(len(texts))
        assert gate.wait(60)
        return lengths(texts)

    monkeypatch.setattr(score_service, "_MOST_WAITING", 5)
    service = ScoreService(slow)
    service.start()
    first = service.submit([(1, 2)])
    until(lambda: seen)
    waiting = [service.submit([(1,)] * count) for count in (2, 1, 2)]
    with pytest.raises(EngineBusyError, match="5 texts wait already"):
        service.submit([(1,)])
    assert waiting[1].cancel() and service.metrics().waiting == 5
    gate.set()
    assert first.result(60) == [0.25] and waiting[2].result(60) == [0.125, 0.125] and seen == [1, 4]
    assert service.drain(60)
    with pytest.raises(ServiceStoppedError, match="about to end"):
        service.submit([(1,)])
    service.stop()
    assert service.metrics().finished == {"score": 5} and not service.failure_reason


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_network_that_fails_answers_everyone_and_ends_the_server() -> None:
    def broken(texts: Sequence[Ids]) -> list[float]:
        raise RuntimeError("no memory")

    with scoring(broken) as server:
        answer = server.ask("POST", "/pooling", {"input": "a"})
        assert answer.status == 503 and "RuntimeError: no memory" in answer.text
        until(lambda: not server.thread.is_alive())
        assert server.service.failure_reason == "RuntimeError: no memory"
