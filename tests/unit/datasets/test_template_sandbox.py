"""Chat templates that would not end, or fill the memory, are refused in a sentence; all others write what Jinja writes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import jinja2
import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets import template_sandbox, template_worker
from megatron.core.datasets.conversations import ConversationEncoder, open_conversations
from megatron.core.datasets.index_map import IndexCacheFolder
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.template_sandbox import RenderError, RenderLimitError, TemplateProcess, template_process
from megatron.core.datasets.templates import FORMATS, ChatTemplate, Message
from megatron.core.tokenizers.build import ByteTokenizer

MESSAGES: list[Message] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(s=START) %}{% for a in range(60) %}{% set n.s = STEP %}{% endfor %}{{ n.s }}"


def rendered(text: str) -> str:
    return ChatTemplate(text, bos="<s>", eos="</s>", marks=[]).render(MESSAGES)


def refused(process: TemplateProcess, text: str, problem: str) -> None:
    started = time.monotonic()
    with pytest.raises(RenderLimitError, match=problem):
        process.render(text, [{}])
    assert time.monotonic() - started < 60


# What escapes a count of steps, or of the lengths of sums and products.
BOMBS = [
    "{{ 'a'.ljust(2 * 10**9) }}",
    "{{ 'a'.zfill(2 * 10**9) }}",
    "{{ 'a'.center(2 * 10**9) }}",
    "{{ '%2000000000d' | format(1) }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '{:2000000000}'.format(1) }}",
    "{{ '\\t'.expandtabs(2 * 10**9) }}",
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ ('a' * 10**5).replace('', 'b' * 10**5) }}",
    "{{ ('a' * 10**5).translate({97: 'b' * 10**5}) }}",
    "{{ ('b' * 10**5).join(['a'] * 10**5) }}",
    "{{ [[1]] | tojson(indent=2 * 10**9) }}",
    "{{ 'a' | indent(2 * 10**9, true) }}",
    "{{ 'a' | center(2 * 10**9) }}",
    "{{ [range(99999) | list] * 9999 | sum(start=[]) }}",
    "{{ lipsum(n=10**9) }}",
    "{{ 'a' | wordwrap(1) | batch(10**9, 'a') | list }}",
    "{{ 10 ** (10 ** 9) }}",
    DOUBLES.replace("START", "'ab'").replace("STEP", "n.s ~ n.s"),
    DOUBLES.replace("START", "'ab'").replace("STEP", "n.s + n.s"),
    DOUBLES.replace("START", "[1]").replace("STEP", "[n.s, n.s]"),
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{% macro g(n) %}{% if n %}{{ g(n - 1) }}{{ g(n - 1) }}{% endif %}{% endmacro %}{{ g(90) }}",
    ENDLESS,
]


@pytest.mark.parametrize("number", [0, 5, pytest.param(None, marks=pytest.mark.nightly)])
def test_what_fills_the_memory_or_does_not_end_is_refused(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_SECONDS", 10.0 if number is None else 5.0)
    process = TemplateProcess()
    for bomb in BOMBS if number is None else [BOMBS[number]]:
        try:
            (result,) = process.render(bomb, [{}])[1]
        except RenderLimitError as error:
            assert re.search("MiB of memory|seconds; does a loop in it not end|a text of more than", str(error))
        else:
            assert isinstance(result, RenderError), (bomb, result[:100])  # Jinja's own bounds
        assert process.render("{{ 1 + 1 }}", [{}]) == (False, ["2"])
    process.close()


def test_a_template_that_does_not_end_is_refused_and_the_next_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_SECONDS", 0.2)
    process = TemplateProcess()
    refused(process, ENDLESS, "it takes more than 0 seconds; does a loop in it not end")
    monkeypatch.undo()
    assert process.render("{% generation %}{{ x }}{% endgeneration %}", [{"x": 1}, {"x": "\ud800"}]) == (
        True,
        ["\ufdd01\ufdd1", "\ufdd0\ud800\ufdd1"],
    )
    process.close()


@pytest.mark.nightly
def test_a_text_that_is_too_long_is_refused() -> None:
    process = TemplateProcess()
    refused(
        process, f"{{{{ 'a' * {template_worker.MOST_CHARACTERS + 1} }}}}", "a text of more than 67108864 characters"
    )
    process.close()


def test_the_process_sees_neither_secrets_nor_files_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_FOR_TEST", "x")
    process = TemplateProcess()
    process.render("", [{}])
    assert process._process is not None
    assert b"SECRET_FOR_TEST" not in Path(f"/proc/{process._process.pid}/environ").read_bytes()
    process.close()


def test_a_forked_process_has_a_renderer_of_its_own() -> None:
    assert template_process().render("{{ 1 }}", [{}])[1] == ["1"]
    child = os.fork()
    if child == 0:  # pragma: no cover
        os._exit(0 if template_process().render("{{ 2 }}", [{}])[1] == ["2"] else 1)
    assert os.waitpid(child, 0)[1] == 0 and template_process().render("{{ 3 }}", [{}])[1] == ["3"]


def test_the_first_conversation_on_which_a_template_does_not_end_stops_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer = tmp_path / "chat.jsonl", ByteTokenizer()
    path.write_text((json.dumps({"messages": MESSAGES}) + "\n") * 3)
    tokenizer.chat_template = (
        "{% if messages | length > 1 and messages[1].content == 'ho' %}"
        + ENDLESS
        + "{% endif %}{{ messages[0].content }}{{ messages[1].content }}"
    )
    encoder = ConversationEncoder(tokenizer, "tokenizer")
    monkeypatch.setattr(template_sandbox, "MOST_SECONDS", 0.5)
    with pytest.raises(
        DataError,
        match=r"chat\.jsonl, line 1: the chat template does not take the conversation: it takes more than 0 seconds",
    ):
        open_conversations(str(path), encoder, IndexCacheFolder(None))


def test_a_template_without_end_or_sense_is_a_matter_of_settings() -> None:
    with pytest.raises(ConfigError, match="not a Jinja template: unexpected end of template"):
        rendered("{{ x")
    with pytest.raises(DataError, match="maximum recursion"):
        rendered("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


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
    marks, (ours,) = template_process().render(text, [{"messages": MESSAGES}])
    assert ours.replace("\ufdd0", "").replace("\ufdd1", "") == theirs and marks == (plain != text)


def test_a_problem_of_any_length_is_told_in_a_line() -> None:
    (problem,) = template_process().render("{{ raise_exception('a' * 2**27) }}", [{}])[1]
    assert isinstance(problem, RenderError) and len(problem) == 1000
