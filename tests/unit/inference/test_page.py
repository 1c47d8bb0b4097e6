"""The page in a browser: a prompt is continued while one reads along, tokens tell their chances, a phone shows it whole."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from tests.helpers.chromium import Page, browser, program
from tests.unit.inference.clients import Running, bytes_engine, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(program() is None, reason="no chromium is installed")]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server."""
    with serving(bytes_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[Page]:
    """A browser."""
    with browser() as page:
        yield page


@pytest.fixture
def page(server: Running, shared: Page) -> Iterator[Page]:
    """The page, afresh. Whatever was done, nobody else was asked, and no script failed."""
    shared.asked.clear()
    shared.open(f"http://127.0.0.1:{server.port}/")
    yield shared
    assert {urlsplit(address).netloc for address in shared.asked if not address.startswith("data:")} == {
        f"127.0.0.1:{server.port}"
    }
    assert not shared.problems


def ask(page: Page, prompt: str, **settings: float | str) -> None:
    """Fill in the page as somebody with a keyboard does, and start."""
    for name, value in settings.items():
        page.ask(f"document.getElementById('{name}').value = '{value}'")
    page.ask("document.getElementById('prompt').focus(), document.getElementById('prompt').select()")
    page.type(prompt)
    page.press("Enter", control=True)


def test_a_prompt_is_continued_and_tokens_tell_their_chances(page: Page) -> None:
    page.until("document.getElementById('model').textContent.startsWith('tiny, 256 positions')")
    ask(page, "abc", max_tokens=12, temperature=0)
    page.until("!document.getElementById('go').disabled && document.querySelectorAll('.token').length")
    (reply,) = bytes_engine().run(
        [GenerationRequest(tuple(b"abc"), 12, SamplingParams(0.0), logprobs=True, top_logprobs=5)]
    )
    assert page.ask("document.getElementById('answer').textContent") == "abc" + reply.text
    assert page.ask("document.getElementById('tip').hidden")
    place = page.ask("[...document.querySelectorAll('.token')].findIndex(token => /^\\w$/.test(token.textContent))")
    page.point_at(f"document.querySelectorAll('.token')[{place}]")
    page.until("!document.getElementById('tip').hidden")
    rows = page.ask(
        "[...document.querySelectorAll('#tip tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    chances = [float(chance.removesuffix(" %")) / 100 for _, chance in rows]
    likeliest = [math.exp(score) for _, score in reply.tokens[place].top]
    assert chances == pytest.approx(sorted(likeliest, reverse=True), abs=6e-4)
    assert page.ask(
        "[...document.querySelectorAll('#tip tr.picked')].map(row => JSON.parse(row.cells[0].textContent))"
    ) == [chr(reply.ids[place])]
    page.press("Escape")
    assert page.ask("document.getElementById('tip').hidden")
    page.click("document.getElementById('keep')")
    assert page.ask("document.getElementById('prompt').value") == "abc" + reply.text


def test_text_streams_and_stops_when_it_is_told(page: Page, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step = server.service.engine.step
    monkeypatch.setattr(
        server.service.engine, "step", lambda: (time.sleep(0.03), step())[1]
    )  # so that a busy browser is not outrun
    before = server.service.engine.metrics().finished["cancelled"]
    for stop in ("key", "button"):
        ask(page, "a", max_tokens=255, temperature=2)
        page.until("document.querySelectorAll('.token').length > 2")
        assert page.ask("document.getElementById('go').disabled"), (
            "the text came at once, and proves nothing of streams"
        )
        if stop == "key":
            page.press("Escape")
        else:
            page.click("document.getElementById('stop_now')")
        page.until("document.getElementById('status').textContent.startsWith('stopped after')")
    until(lambda: server.service.engine.metrics().finished["cancelled"] == before + 2)


def test_what_is_wrong_is_said_and_can_be_mended(page: Page) -> None:
    ask(page, "a" * 300, max_tokens=8)
    page.until("document.getElementById('problem').textContent.includes('256 positions')")
    ask(page, "ab", max_tokens=4)
    page.until("!document.getElementById('go').disabled && document.querySelectorAll('.token').length")
    assert page.ask("document.getElementById('problem').textContent") == ""


def test_a_phone_needs_no_sideways_scrolling(page: Page) -> None:
    page.resize(375, 667)
    try:
        page.ask("document.querySelector('details').open = true")
        ask(page, "wide" * 40, max_tokens=30, temperature=2)
        page.until("!document.getElementById('go').disabled && document.querySelectorAll('.token').length")
        page.point_at("[...document.querySelectorAll('.token')].at(-1)")
        assert page.ask("[document.documentElement.scrollWidth, innerWidth]") == [375, 375]
        assert page.ask(
            "[...document.querySelectorAll('button')].every(button => button.getBoundingClientRect().height >= 44)"
        )
    finally:
        page.send("Emulation.clearDeviceMetricsOverride")
