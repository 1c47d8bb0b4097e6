"""Chat templates that would not end, or fill the memory, are refused in a sentence; all others write what Jinja writes."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from megatron.core.datasets import template_sandbox
from megatron.core.datasets.conversations import ConversationEncoder, open_conversations
from megatron.core.datasets.index_map import IndexCacheFolder
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.templates import FORMATS, ChatTemplate, Message
from megatron.core.tokenizers.build import ByteTokenizer

MESSAGES: list[Message] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def rendered(text: str) -> str:
    return ChatTemplate(text, bos="<s>", eos="</s>", marks=[]).render(MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if false %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
    ],
)
def test_a_loop_that_does_not_end_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_STEPS", 500)
    with pytest.raises(
        DataError,
        match=r"does not take the conversation: (it takes more than 500 steps; does a loop|maximum recursion)",
    ):
        rendered(text)


def test_the_first_conversation_on_which_a_template_does_not_end_stops_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_STEPS", 500)
    path, tokenizer = tmp_path / "chat.jsonl", ByteTokenizer()
    path.write_text((json.dumps({"messages": MESSAGES}) + "\n") * 3)
    tokenizer.chat_template = "{% for a in range(9999) %}{% endfor %}"
    with pytest.raises(
        DataError,
        match=r"chat\.jsonl, line 1: the chat template does not take the conversation: it takes more than 500",
    ):
        open_conversations(str(path), ConversationEncoder(tokenizer, "tokenizer"), IndexCacheFolder(None))


def test_a_rendering_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_SECONDS", -1.0)
    with pytest.raises(DataError, match="it takes more than -1 seconds; does a loop in it not end"):
        rendered("{% for a in range(200) %}{% endfor %}")


@pytest.mark.parametrize(
    "text",
    [
        "{% set n = namespace(s='ab') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='ab') %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{% for a in range(9999) %}{{ 'a' * 10**5 }}{% endfor %}",
    ],
)
def test_a_text_that_fills_the_memory_is_refused_before_it_is_made(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_CHARACTERS", 10**6)
    with pytest.raises(DataError, match="it makes a text of [0-9]+ characters; at most 1000000 are taken"):
        rendered(text)


def test_a_power_too_large_is_refused() -> None:
    with pytest.raises(DataError, match=r"10 \*\* 99999 is too large"):
        rendered("{{ 10 ** 99999 }}")


@pytest.mark.parametrize(
    "text",
    [
        *(body for name, body in FORMATS.items() if name == "chatml"),
        "{% for a in range(9) %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}{{ 'a' ~ 1 ~ none }}{{ -2 ** 3 * 1.5 }}",
        "{% for a in [[1, [2]], 3] recursive %}{{ loop(a) if a is iterable else a }}{% else %}none{% endfor %}{{ [1] + [2] }}",
        "{% for m in messages if m.role == 'user' %}{{ m.content + '!' }}{% else %}nobody{% endfor %}{% macro f(x) %}<{{ x }}{% endmacro %}{{ f(3) }}",
    ],
)
def test_other_templates_write_what_jinja_writes(text: str) -> None:
    plain = text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    theirs = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(plain).render(messages=MESSAGES)
    marked = rendered(text)
    assert marked == theirs
