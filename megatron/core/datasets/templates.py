"""How a conversation is written down: Jinja templates, run in a sandbox, that also say which text is an answer.

A template is given `messages`, `bos_token`, `eos_token`, `tools` and `add_generation_prompt`, like those that come with
published tokenizers. The text inside {% generation %} ... {% endgeneration %} is what the assistant says, and what is
learnt. A template without these marks is rendered up to each answer and through it; what the answer adds is learnt:

    messages[:i] and the invitation to answer     <user>How?<end><assistant>
    messages[:i + 1]                              <user>How?<end><assistant>So.<end>
                                                                            ^^^^^^^^

Text of a message cannot forge a mark: where it holds the name of one, the name stays ordinary characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro

from megatron.core.config.flags import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.template_sandbox import RenderLimitError, TemplateSandbox, render_limits

# Characters that Unicode keeps out of text, so that they can say something about it.
OPENS, CLOSES, APART, BOS, EOS = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
RESERVED = re.compile(f"[{OPENS}-{EOS}]")
# Words of a template that may be tokens: <|end|>, <s>, </s>, <<SYS>>, [INST], [/INST].
MARK_LIKE = re.compile(r"<\|[^|<>\s]+\|>|</?\w+>|\[/?[A-Z_]+\]")

Message = Mapping[str, Any]
_RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    MemoryError,
)

# One line each where the text is one line; {{ '\n' }} is the only way to end one, so that editors cannot change the text.
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "chatml": (
            "{% for message in messages %}"
            "{% if message.tool_calls %}{{ raise_exception('chatml has no words for tool_calls') }}{% endif %}"
            "{{ '<|im_start|>' + message.role + '\\n' }}"
            "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
            "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
            "{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
        "llama3": (
            "{{ bos_token }}{% for message in messages %}"
            "{% if message.tool_calls %}{{ raise_exception('llama3 has no words for tool_calls here') }}{% endif %}"
            "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
            "{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}"
            "{% else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}"
            "{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
        ),
        "llama2": (
            "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
            "{% for message in (messages if system is none else messages[1:]) %}"
            "{% if message.tool_calls or message.role != ('assistant' if loop.index0 % 2 else 'user') %}"
            "{{ raise_exception('llama2 has words for user and assistant in turn, after a system message, only') }}{% endif %}"
            "{% if message.role == 'assistant' %}{% generation %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endgeneration %}"
            "{% else %}{{ bos_token + '[INST] ' }}"
            "{% if loop.first and system is not none %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}"
            "{{ message.content | trim + ' [/INST]' }}{% endif %}"
            "{% endfor %}"
        ),
        "plain": (
            "{% for message in messages %}"
            "{% if message.tool_calls %}{{ raise_exception('plain has no words for tool_calls') }}{% endif %}"
            "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
            "{% else %}{{ message.content }}{% endif %}"
            "{% endfor %}"
        ),
        "mistral": (
            "{% set system = messages[0].content if messages[0].role == 'system' else none %}{{ bos_token }}"
            "{% for message in (messages if system is none else messages[1:]) %}"
            "{% if message.tool_calls or message.role != ('assistant' if loop.index0 % 2 else 'user') %}"
            "{{ raise_exception('mistral has words for user and assistant in turn, after a system message, only') }}{% endif %}"
            "{% if message.role == 'assistant' %}{% generation %}{{ ' ' + message.content | trim + eos_token }}{% endgeneration %}"
            "{% else %}{{ '[INST] ' }}{% if loop.first and system is not none %}{{ system + '\\n\\n' }}{% endif %}"
            "{{ message.content + ' [/INST]' }}{% endif %}"
            "{% endfor %}"
        ),
    }
)


@dataclass(frozen=True, slots=True)
class TemplateSegment:
    """Some text of a conversation. answer: it is learnt. mark: it is the name of a token."""

    text: str
    answer: bool
    mark: bool = False


class TemplateLimitError(DataError):
    """A template that meets a bound of the sandbox: it would do so with the next conversation too."""


class ChatTemplate:
    """Writes conversations. marks: names of tokens that the text of a message must not forge."""

    def __init__(self, text: str, *, bos: str, eos: str, marks: Sequence[str]) -> None:
        environment = TemplateSandbox([_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _tojson_filter
        environment.globals["raise_exception"] = _raise_template_error
        try:
            self._template = environment.compile_template(text)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template is not a Jinja template: {error}") from error
        self._tells_answers = any(
            isinstance(block.call.node, nodes.ExtensionAttribute)
            for block in environment.parse(text).find_all(nodes.CallBlock)
        )
        self._names = {"bos_token": bos, "eos_token": eos}
        self._marks = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)) or "(?!)")

    def render(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False) -> str:
        """Render a conversation to one text. `DataError` if the template rejects it."""
        return "".join(
            piece.text
            for piece in self._split_into_segments(self._render(messages, tools, add_generation_prompt), answers=())
        )

    def render_segments(self, messages: Sequence[Message], tools: Any = None) -> list[TemplateSegment]:
        """Render a conversation to segments: token names (marks), answers, the rest. `DataError` if it is rejected."""
        whole = self._render(messages, tools, False)
        return self._split_into_segments(
            whole, () if self._tells_answers else self._answer_spans(messages, tools, whole)
        )

    def render_with_generation_prompt(self, messages: Sequence[Message], tools: Any = None) -> list[TemplateSegment]:
        """Render a conversation with the next answer's generation prompt. `DataError` as in `render_segments`."""
        return self._split_into_segments(self._render(messages, tools, True), answers=())

    def _answer_spans(self, messages: Sequence[Message], tools: Any, whole: str) -> list[tuple[int, int]]:
        """Return [start, end) of each answer in the text `whole`, for a template without {% generation %}.

        `DataError` if the template rewrites earlier text when a message is added.
        """
        result: list[tuple[int, int]] = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:place], tools, True)
                through = self._render(messages[: place + 1], tools, False)
                if not (through.startswith(before) and whole.startswith(through)):
                    raise DataError(
                        f"the chat template writes the start of a conversation anew when message {place + 1} follows, "
                        "so that what the answer adds cannot be told; put {% generation %} ... {% endgeneration %} "
                        "around the answers in it"
                    )
                result.append((len(before), len(through)))
        return result

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str:
        """Render to text with the control characters. `DataError` if that fails, `TemplateLimitError` at a limit."""
        guarded = [_map_strings(message, self._escape_marks) for message in messages]
        try:
            with render_limits():
                return self._template.render(
                    messages=guarded,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._names,
                )
        except RenderLimitError as error:
            raise TemplateLimitError(f"the chat template does not take the conversation: {error}") from error
        except _RENDER_ERRORS as error:
            raise DataError(f"the chat template does not take the conversation: {error}") from error

    def _escape_marks(self, text: str) -> str:
        """Return the text with APART inserted into each token name, so that it is not taken for that token.

        `DataError` if it holds a reserved character.
        """
        if RESERVED.search(text):
            raise DataError("a message holds one of the characters U+FDD0 to U+FDD4, which are not text")
        return self._marks.sub(lambda match: match[0][0] + APART + match[0][1:], text)

    def _split_into_segments(self, text: str, answers: Sequence[tuple[int, int]]) -> list[TemplateSegment]:
        """Split rendered text into segments at token names and at the edges of answers. answers: [start, end) of each,
        added to those that control characters mark.
        """
        edges = {edge for span in answers for edge in span}
        pieces: list[TemplateSegment] = []
        opened, begin = False, 0

        def add_template_segment(part: str, mark: bool) -> None:
            part = part.replace(APART, "")
            if part:
                pieces.append(TemplateSegment(part, opened, mark))

        cuts: dict[int, re.Match[str] | None] = dict.fromkeys(edges)
        cuts.update(
            {result.start(): result for result in re.finditer(f"[{OPENS}{CLOSES}]|{self._marks.pattern}", text)}
        )
        for place in sorted(cuts):
            result = cuts[place]
            add_template_segment(text[begin:place], False)
            begin = place
            if place in edges:
                opened = any(first <= place < last for first, last in answers)
            if result is not None:
                begin = result.end()
                if result[0] in (OPENS, CLOSES):
                    opened = result[0] == OPENS
                else:
                    add_template_segment(result[0], True)
        add_template_segment(text[begin:], False)
        return pieces


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every string in it, but not to keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(part, change) for key, part in value.items()}
    return [_map_strings(part, change) for part in value] if isinstance(value, list) else value


def _tojson_filter(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


class _GenerationTag(Extension):
    """{% generation %}: what is written inside stands between OPENS and CLOSES."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a generation block into a call of `_marked`, which puts `OPENS` and `CLOSES` around its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return OPENS + caller() + CLOSES
