"""Many who ask at once, in every way there is, with some who leave and some who cannot be understood among them.

Nothing is lost, nothing crosses: each answer is that of the same request alone; and at the end all is counted and given back.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.inference.requests import GenerationReply, GenerationRequest
from megatron.inference.sampling import SamplingParams
from tests.unit.inference.clients import Running, bytes_engine, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KINDS = ("api", "whole", "stream", "several", "stop", "chat", "chat stream", "bad", "leaves", "leaves stream")


@dataclass(frozen=True)
class Case:
    """A call, and what the engine is asked for it: requests of which each gives a text of the answer; () if there is none."""

    kind: str
    path: str
    body: dict[str, Any]
    requests: tuple[GenerationRequest, ...] = ()


def cases(count: int) -> list[Case]:
    """Mixed ones, of every kind the same number, each with a prompt and a seed of its own."""
    chance, found = random.Random(7), []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        prompt = f"{number:03d}" * chance.randint(1, 12)
        length, seed, greedy = chance.randint(1, 24), 10 * number, chance.random() < 0.3
        sampling = SamplingParams(0.0 if greedy else 1.0, top_p=0.9)
        usual = {"temperature": 0 if greedy else 1, "top_p": 0.9, "seed": seed}
        asked = {"prompt": prompt, "max_tokens": length, **usual}

        def request(text: str, place: int = 0, **changes: Any) -> GenerationRequest:
            return GenerationRequest(tuple(text.encode()), length, sampling, seed + place, **changes)

        if kind == "api":
            body = {
                "prompts": [prompt, prompt + "x"],
                "tokens_to_generate": length,
                "random_seed": seed,
                **({"top_k": 1} if greedy else {"top_p": 0.9}),
            }
            one = SamplingParams(1.0, top_k=1) if greedy else sampling
            requests = tuple(
                GenerationRequest(tuple(text.encode()), length, one, seed + place)
                for place, text in enumerate(body["prompts"])
            )
            found.append(Case(kind, "/api", body, requests))
        elif kind == "several":
            found.append(
                Case(
                    kind,
                    COMPLETIONS,
                    {**asked, "n": 3, "logprobs": 1},
                    tuple(request(prompt, place) for place in range(3)),
                )
            )
        elif kind == "stop":
            words = [chr(chance.randrange(32, 127)) for _ in range(6)]
            found.append(Case(kind, COMPLETIONS, {**asked, "stop": words}, (request(prompt, stop_words=tuple(words)),)))
        elif kind.startswith("chat"):
            written = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": length,
                **usual,
                "stream": kind != "chat",
            }
            found.append(Case(kind, CHAT, body, (request(written, stop_words=("<|im_end|>",)),)))
        elif kind == "bad":
            found.append(Case(kind, COMPLETIONS, {**asked, chance.choice(["temperature", "seed", "n", "stop"]): {}}))
        elif kind.startswith("leaves"):
            found.append(
                Case(kind, COMPLETIONS, {**asked, "max_tokens": 200, "ignore_eos": True, "stream": kind != "leaves"})
            )
        else:
            found.append(Case(kind, COMPLETIONS, {**asked, "stream": kind == "stream"}, (request(prompt),)))
    return found


def asked(server: Running, case: Case) -> Any:
    """What becomes of a call: its texts, by their places; the status of a refusal; or that its client has left."""
    if case.kind.startswith("leaves"):
        with server.begin(case.path, case.body) as sock:
            if case.kind == "leaves":
                time.sleep(0.05)
            else:
                sock.recv(1)
        return "left"
    answer = server.ask("POST", case.path, case.body)
    if answer.status != 200:
        return answer.status
    if not case.body.get("stream"):
        found = answer.json
        return (
            [text[len(prompt) :] for text, prompt in zip(found["text"], case.body["prompts"], strict=True)]
            if case.kind == "api"
            else [
                choice["text"] if case.path == COMPLETIONS else choice["message"]["content"]
                for choice in found["choices"]
            ]
        )
    *events, last, nothing = answer.text.split("\n\n")
    assert last == "data: [DONE]" and nothing == ""
    choices = [
        choice
        for event in events
        if event.startswith("data: ")
        for choice in json.loads(event.removeprefix("data: "))["choices"]
    ]
    return [
        "".join(
            choice["text"] if case.path == COMPLETIONS else choice["delta"].get("content", "") for choice in choices
        )
    ]


def counts(server: Running) -> dict[str, float]:
    """/metrics."""
    lines = [line for line in server.ask("GET", "/metrics").text.splitlines() if not line.startswith("#")]
    return {
        name.removeprefix("megatron_inference_"): float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines)
    }


def loaded(count: int, **engine: Any) -> None:
    """All cases at once, on an engine that is too small for them."""
    asking, found = cases(count), dict[int, Any]()
    with serving(bytes_engine(waiting=4 * count, **engine)) as server:
        threads = [
            threading.Thread(target=lambda number=number: found.update({number: asked(server, asking[number])}))
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        server.settle()
        after = counts(server)
    alone = iter(bytes_engine().run([request for case in asking for request in case.requests]))
    expected: list[list[GenerationReply]] = [[next(alone) for _ in case.requests] for case in asking]
    for number, (case, replies) in enumerate(zip(asking, expected, strict=True)):
        wanted = {"bad": 400, "leaves": "left", "leaves stream": "left"}.get(
            case.kind, [reply.text for reply in replies]
        )
        assert found[number] == wanted, (number, case)
    tally(asking, expected, after)


def tally(asking: list[Case], expected: list[list[GenerationReply]], after: dict[str, float]) -> None:
    """/metrics agrees with what was asked; those who left may have been heard or not."""
    kinds = Counter(case.kind for case in asking)
    gone = kinds["leaves"] + kinds["leaves stream"]
    reasons = Counter(reply.reason for replies in expected for reply in replies)
    assert after["cache_blocks_used"] == after["requests_running"] == after["requests_waiting"] == 0
    assert after['finished_total{reason="stop"}'] == reasons["stop"] and after['finished_total{reason="error"}'] == 0
    assert reasons["length"] <= after['finished_total{reason="length"}'] <= reasons["length"] + gone
    asked_of_engine = sum(reasons.values())
    assert asked_of_engine + kinds["leaves stream"] <= after["requests_total"] <= asked_of_engine + gone
    assert sum(value for name, value in after.items() if name.startswith("finished_total")) == after["requests_total"]
    made = sum(
        len(reply.tokens) + (reply.reason == "stop" and len(reply.tokens) == 0)
        for replies in expected
        for reply in replies
    )
    assert made <= after["generated_tokens_total"] <= made + reasons["stop"] + 200 * gone
    assert after['http_answers_total{path="/api",status="200"}'] == kinds["api"]
    assert after[f'http_answers_total{{path="{COMPLETIONS}",status="400"}}'] == kinds["bad"]
    assert after[f'http_answers_total{{path="{CHAT}",status="200"}}'] == kinds["chat"] + kinds["chat stream"]


def test_two_hundred_at_once_lose_nothing_and_cross_nothing() -> None:
    loaded(200, together=16, block=8)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "engine", [{"together": 64, "block": 16}, {"together": 8, "block": 4, "tokens": 64, "gb": 0.0006}]
)
def test_six_hundred_at_once_lose_nothing_and_cross_nothing(engine: dict[str, Any]) -> None:
    loaded(600, **engine)
