"""Bodies that nobody should send: each gets a 4xx with a message, at once, and the next call is served as if nothing had been."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.inference.server import openai, put_api
from megatron.inference.server.serving import RequestLimits
from tests.unit.inference.clients import Answer, Running, bytes_engine, serving

GOOD: dict[str, dict[str, Any]] = {
    "/api": {"prompts": ["a"], "tokens_to_generate": 2, "random_seed": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "seed": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
NAMES = {
    "/api": [field.name for field in put_api.FIELDS],
    "/v1/completions": [field.name for field in openai.COMPLETION],
    "/v1/chat/completions": [field.name for field in openai.CHAT],
}
PATHS = st.sampled_from(sorted(GOOD))
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # halves of surrogate pairs, too
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([2**63, -(2**64), 10**400, -0.0, 5e-324, 1.7e308]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
BODY_BYTES = 20_000
QUICK = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One for all bodies; at the end it has nothing left of them."""
    limits = RequestLimits(body_bytes=BODY_BYTES, prompts=4, new_tokens=8, read_seconds=5.0)
    with serving(bytes_engine(together=8, block=8), limits=limits) as running:
        yield running
        running.settle()
        assert running.service.failure_reason == "" and running.service.engine.metrics().blocks_used == 0
        for path, body in GOOD.items():
            assert running.ask("POST", path, body).status == 200


def message(answer: Answer) -> str:
    """What an error says, in the way of its path."""
    found = answer.json
    return str(found["message"] if "message" in found else found["error"]["message"])


def answered(server: Running, path: str, body: bytes) -> None:
    """Served, or refused with a reason."""
    answer = server.ask("POST", path, body)
    assert answer.status == 200 or 400 <= answer.status < 500 and message(answer), (path, body[:200], answer)


@QUICK
@given(PATHS, st.data())
def test_fields_of_any_kind(server: Running, path: str, data: st.DataObject) -> None:
    name = data.draw(st.one_of(st.sampled_from(NAMES[path]), TEXT))
    changed = {**GOOD[path], name: data.draw(VALUES)}
    answered(server, path, json.dumps(changed).encode())  # with NaN and Infinity, which are no JSON


@QUICK
@given(PATHS, VALUES)
def test_bodies_of_any_json(server: Running, path: str, body: Any) -> None:
    answer = server.ask("POST", path, json.dumps(body).encode())
    assert 400 <= answer.status < 500 and message(answer), (body, answer)


@QUICK
@given(PATHS, st.binary(max_size=64))
@example("/api", b"\xff\xfe{\x00}\x00")
@example("/api", b'{"prompts": ["\xed\xa0\x80"]}')
@example("/v1/completions", b"[" * 19_000)
@example("/v1/completions", b'{"a":' * 3_000)
@example("/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * 19_000 + b"}")
@example("/v1/completions", b'{"prompt": "a", "temperature": 1e400}')
@example("/v1/completions", b'{"prompt": "a", "temperature": NaN}')
@example("/v1/chat/completions", b'{"messages": ' + b"[" * 9_000 + b"]" * 9_000 + b"}")
@example("/v1/chat/completions", b"\xef\xbb\xbf{}")
def test_bytes_of_any_kind(server: Running, path: str, body: bytes) -> None:
    answer = server.ask("POST", path, body)
    assert 400 <= answer.status < 500 and message(answer), (body[:80], answer)


@QUICK
@given(PATHS, st.integers(0, 60), st.integers(0, 255))
def test_good_bodies_with_a_byte_changed_or_cut_off(server: Running, path: str, place: int, byte: int) -> None:
    body = bytearray(json.dumps(GOOD[path]).encode())
    place %= len(body)
    answer = server.ask("POST", path, bytes(body[:place]))
    assert answer.status == 400 and message(answer), (bytes(body[:place]), answer)
    body[place] = byte
    answered(server, path, bytes(body))


@pytest.mark.parametrize("path", GOOD)
def test_a_huge_body_is_refused_before_it_is_read(server: Running, path: str) -> None:
    answer = server.ask("POST", path, json.dumps({**GOOD[path], "user": "x" * 40 * BODY_BYTES}).encode())
    assert answer.status == 413 and str(BODY_BYTES) in message(answer)


LONG = "\U0001f600\u202e\u0000" * 300
HOSTILE: dict[str, dict[str, Any]] = {
    "many choices": {"n": 10**9},
    "as many as may be": {"n": 4, "max_tokens": 8, "logprobs": 20},
    "many tokens": {"max_tokens": 10**9},
    "a number of 5,000 digits": {"max_tokens": int("9" * 4000)},
    "a bias of everything": {"logit_bias": {str(token): 100 for token in range(1000)}},
    "stop words without end": {"stop": ["x"] * 1000},
    "stop words as long as may be": {"stop": [letter * 999 + "b" for letter in "abcdefghijklmnop"], "n": 4},
    "a stop word that is nearly there": {"stop": ["a" * 999 + "b"] * 16, "prompt": "a"},
    "strange letters": {"prompt": LONG, "stop": [LONG], "user": LONG},
    "half a pair": {"prompt": "\ud800"},
    "ids of nobody": {"prompt": [2**63, -1, 10**30]},
    "many prompts": {"prompt": ["a"] * 5000},
    "lists in lists": {"prompt": [[[[1]]]]},
    "fields of nobody": {f"max_token{number}": 1 for number in range(1200)},
    "penalties": {"presence_penalty": 1e308, "frequency_penalty": -1e308},
    "penalties as large as may be": {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 100},
    "a seed of nobody": {"seed": -(10**30)},
    "a stream of scores": {"stream": True, "logprobs": 20, "n": 4, "max_tokens": 8},
}


def others_are_answered(server: Running, bodies: list[tuple[str, bytes]]) -> None:
    """Each is served or refused, at once, while somebody else asks all the time and gets what is always right."""
    expected, ended, wrong = server.ask("POST", "/v1/completions", GOOD["/v1/completions"]), threading.Event(), []

    def ask_on() -> None:
        while not ended.is_set():
            answer = server.ask("POST", "/v1/completions", GOOD["/v1/completions"])
            if answer.status != 200 or answer.json["choices"] != expected.json["choices"]:
                wrong.append(answer)

    other = threading.Thread(target=ask_on)
    other.start()
    try:
        for path, body in bodies:
            answer = server.ask("POST", path, body)
            assert answer.status == 200 or 400 <= answer.status < 500 and len(message(answer)) < 5000, (
                body[:200],
                answer,
            )
    finally:
        ended.set()
        other.join(60)
    assert not wrong, wrong[0]


def test_hostile_requests_keep_nobody_from_an_answer(server: Running) -> None:
    bodies = [{**GOOD["/v1/completions"], **changes} for changes in HOSTILE.values()]
    chats = [
        {**GOOD["/v1/chat/completions"], "messages": [{"role": "user", "content": LONG[:20]}] * 40, "stop": [LONG[:9]]}
    ]
    others_are_answered(
        server,
        [
            *(("/v1/completions", json.dumps(body).encode()) for body in bodies),
            *(("/v1/chat/completions", json.dumps(body).encode()) for body in chats),
        ],
    )


@pytest.mark.nightly
def test_a_thousand_hostile_requests_keep_nobody_from_an_answer(server: Running) -> None:
    draw = random.Random(7)
    values = [change for changes in HOSTILE.values() for change in changes.items()]
    bodies = []
    for _ in range(1000):
        path = draw.choice(sorted(GOOD))
        body = {**GOOD[path], **dict(draw.sample(values, draw.randrange(1, 6)))}
        data = bytearray(json.dumps(body).encode())
        for _ in range(draw.choice((0, 0, 1, 5))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        bodies.append((path, bytes(data)))
    others_are_answered(server, bodies)
