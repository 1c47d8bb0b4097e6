"""How a conversation is written down: Jinja templates, run in a sandbox, that also say which text is an answer.

A template is given what transformers gives it: `messages` (without keys that are null; thoughts under each of their usual
names), `tools`, `documents`, `add_generation_prompt`, the names of the tokenizer's special tokens, and the variables of a
row. The text inside {% generation %} ... {% endgeneration %} is what the assistant says, and what is learnt; in a template
without these marks, what an answer adds is found in `answer_spans.py`.

The template sees every text as it is. Text of the user and of tools cannot forge a mark: where it holds the name of one,
found by a second rendering in which the name is broken up, the name stays ordinary characters. Texts of the system and of
the assistant are the operator's and the model's own, and what they hold of marks are marks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.answer_spans import MARK_LIKE, PLACE, AnswerFinder, AnswerNotFoundError, common_length
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.message_content import (
    ContentForms,
    PreparedMessage,
    map_strings,
    strings_of,
    with_other_arguments,
)
from megatron.core.datasets.template_sandbox import (
    InvalidTemplateError,
    RenderError,
    RenderLimitError,
    template_process,
)
from megatron.core.datasets.template_worker import CLOSES, OPENS

# Characters that Unicode keeps out of text, so that they can say something about it.
APART, BOS, EOS = PLACE, "\ufdd3", "\ufdd4"
RESERVED = re.compile(f"[{OPENS}-{EOS}]")
TRUSTED_ROLES = ("system", "developer", "assistant")
DATE = "2024-07-26"  # that `strftime_now` says in training: the same ids on every day

_AT_ONCE = 16  # renderings that the process is asked for together: each may be as long as its conversation

Message = Mapping[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NOT_VARIABLES = {  # arguments of `apply_chat_template` that are no variables of the template
    *(
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
    ),
    *("sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"),
}
_QUESTION, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}

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
    """Writes conversations. marks_answers: the template says by {% generation %} what is learnt.

    marks: names of tokens that the text of a user must not forge. control: those among them that a template never reads in
    a user's text. names: of the tokenizer's other special tokens, by variable (pad_token, ...). now: ISO time that
    `strftime_now` says; None: the clock's. for_tools: writes conversations with tools instead.
    """

    def __init__(
        self,
        text: str,
        *,
        bos: str,
        eos: str,
        marks: Collection[str],
        control: Collection[str] = (),
        names: Mapping[str, str] = _NOTHING,
        now: str | None = DATE,
        for_tools: ChatTemplate | None = None,
    ) -> None:
        self._text, self._now, self._for_tools = text, now, for_tools
        try:
            self.marks_answers, _ = template_process().render(text, [])
        except InvalidTemplateError as error:
            raise ConfigError(f"the chat template is not a Jinja template: {error}") from error
        except RenderLimitError as error:
            raise ConfigError(f"the chat template cannot be used: {error}") from error
        self._names = {**names, "bos_token": bos, "eos_token": eos}
        self._marks = _pattern_of(marks)
        self._guards = tuple(_Guard.of(names) for names in (marks, control) if names or names is marks)
        self._forms = ContentForms(lambda conversations: self._render_prepared(conversations, None, _NOTHING))

    def render(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False) -> str:
        """Render a conversation to one text. `DataError` if the template rejects it."""
        if tools and self._for_tools is not None:
            return self._for_tools.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return _without_tags(self._render_first(messages, add_generation_prompt, tools, _NOTHING)[1])

    def render_segments(
        self, messages: Sequence[Message], tools: Any = None, variables: Mapping[str, Any] = _NOTHING
    ) -> list[TemplateSegment]:
        """Render a conversation to segments: token names (marks), answers, the rest. `DataError` if it is rejected.

        variables: other variables of the template.
        """
        if tools and self._for_tools is not None:
            return self._for_tools.render_segments(messages, tools, variables)
        prepared, whole = self._render_first(messages, False, tools, variables)
        text = _without_tags(whole)
        if self.marks_answers:
            spans = _spans_of_tags(whole)
        else:
            spans = self._find_answers(prepared, text, tools, variables)
        return self._split(text, spans, self._forged(prepared, text, False, tools, variables))

    def render_with_generation_prompt(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        variables: Mapping[str, Any] = _NOTHING,
        *,
        continues: bool = False,
    ) -> list[TemplateSegment]:
        """Render a conversation up to where the next answer begins; continues: up to where the last message, an answer, goes
        on. Nothing is learnt. `DataError` as in `render_segments`.
        """
        if tools and self._for_tools is not None:
            return self._for_tools.render_with_generation_prompt(messages, tools, variables, continues=continues)
        prepared, pieces = self._render_unlearnt(messages, not continues, tools, variables)
        if not continues:
            return pieces
        behind = self._finder(tools, variables).text_behind_last(prepared)
        if behind is None or prepared[-1]["role"] != "assistant":
            raise DataError(
                "the last message is no answer whose end the chat template tells, so it cannot be continued"
            )
        return _cut_end(pieces, len(behind))

    def render_unlearnt(
        self, messages: Sequence[Message], tools: Any = None, variables: Mapping[str, Any] = _NOTHING
    ) -> list[TemplateSegment]:
        """Render a whole conversation of which nothing is learnt. `DataError` as in `render_segments`."""
        if tools and self._for_tools is not None:
            return self._for_tools.render_unlearnt(messages, tools, variables)
        return self._render_unlearnt(messages, False, tools, variables)[1]

    def _render_unlearnt(
        self, messages: Sequence[Message], invites: bool, tools: Any, variables: Mapping[str, Any]
    ) -> tuple[list[PreparedMessage], list[TemplateSegment]]:
        prepared, whole = self._render_first(messages, invites, tools, variables)
        text = _without_tags(whole)
        return prepared, self._split(text, [], self._forged(prepared, text, invites, tools, variables))

    def split_text(self, text: str) -> list[TemplateSegment]:
        """Split a text that no template wrote at the names of tokens."""
        _refuse_reserved(text)
        return self._split(text, [], ())

    def marks_in(self, text: str) -> list[str]:
        """Return the names of tokens in a text, in order."""
        return self._marks.findall(text)

    @cached_property
    def answer_end(self) -> str:
        """What the template writes behind an answer, as far as it is the same at the end of a conversation and before a
        message; if that is nothing, what it writes at the end, or else the mark that begins a message. "" if it has no end.
        """
        last, later = self._after_answer
        header = MARK_LIKE.match(later)
        return last[: common_length(last, later)] or last or ("" if header is None else header[0])

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes the name of a tool that it is given, as far as a probe can tell."""
        if self._for_tools is not None:
            return self._for_tools.writes_tools
        tool = {"type": "function", "function": {"name": "probe7", "description": "", "parameters": {"type": "object"}}}
        (text,) = self._render_prepared([(self._forms.prepare([_QUESTION]), False)], [tool], _NOTHING)
        return isinstance(text, RenderError) or "probe7" in text

    @cached_property
    def ends_answers(self) -> bool:
        """Whether the template writes something behind the last answer of a conversation."""
        return bool(self._after_answer[0].strip())

    @cached_property
    def _after_answer(self) -> tuple[str, str]:
        question, answer = self._forms.prepare([_QUESTION, _ANSWER])
        return self._finder(None, _NOTHING).text_after_answer(question, answer)

    def _finder(self, tools: Any, variables: Mapping[str, Any]) -> AnswerFinder:
        def render(requests: Sequence[tuple[Sequence[Message], bool]]) -> list[str | RenderError]:
            texts = self._render_prepared(requests, tools, variables)
            return [one if isinstance(one, RenderError) else _without_tags(one) for one in texts]

        return AnswerFinder(render)

    def _find_answers(
        self, messages: Sequence[PreparedMessage], text: str, tools: Any, variables: Mapping[str, Any]
    ) -> list[tuple[int, int]]:
        """Return [start, end) of each answer in a text, for a template without {% generation %}. `DataError`."""
        try:
            return self._finder(tools, variables).spans(messages, text, answers_end=self.ends_answers)
        except AnswerNotFoundError as error:
            raise DataError(
                f"what message {error.message} adds to the text of the conversation cannot be told, since the chat template "
                "writes the start of a conversation anew when it follows; put {% generation %} ... {% endgeneration %} "
                "around the answers in it, and give it with --chat-template"
            ) from error

    def _render_first(
        self, messages: Sequence[Message], invites: bool, tools: Any, variables: Mapping[str, Any]
    ) -> tuple[list[PreparedMessage], str]:
        """Return the messages as the template takes them, and their text. `DataError` for what it has no words for."""
        if others := sorted(_NOT_VARIABLES & variables.keys()):
            raise DataError(f"chat_template_kwargs are variables of the template, and {', '.join(others)} is none")
        for given in (*messages, tools, variables):
            _refuse_reserved(*strings_of(given))
        prepared = self._forms.prepare(messages)
        (text,) = self._render_prepared([(prepared, invites)], tools, variables)
        if isinstance(text, RenderError) and (other := with_other_arguments(prepared)) is not None:
            (again,) = self._render_prepared([(other, invites)], tools, variables)
            prepared, text = (prepared, text) if isinstance(again, RenderError) else (other, again)
        return prepared, _text_or_error(text)

    def _render_prepared(
        self, conversations: Sequence[tuple[Sequence[Message], bool]], tools: Any, variables: Mapping[str, Any]
    ) -> list[str | RenderError]:
        """Render conversations, each with or without a generation prompt. `TemplateLimitError` at a bound."""
        contexts = [
            {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": invites,
                **self._names,
                **variables,
            }
            for messages, invites in conversations
        ]
        process, texts = template_process(), list[str | RenderError]()
        try:
            for first in range(0, len(contexts), _AT_ONCE):
                texts += process.render(self._text, contexts[first : first + _AT_ONCE], now=self._now)[1]
            return texts
        except RenderLimitError as error:
            raise TemplateLimitError(f"the chat template does not take the conversation: {error}") from error

    def _forged(
        self, messages: Sequence[PreparedMessage], text: str, invites: bool, tools: Any, variables: Mapping[str, Any]
    ) -> set[int]:
        """Return where in `text` the names of marks stand that users and tools wrote. `DataError` if that cannot be told."""
        forged_names = sorted({mark for message in messages for mark in self._marks_of_user(message)})
        for guard in self._guards if forged_names else ():
            broken = [
                message
                if message["role"] in TRUSTED_ROLES
                else {**map_strings(message, guard.break_up), "role": message["role"]}
                for message in messages
            ]
            (second,) = self._render_prepared([(broken, invites)], tools, variables)
            second = "" if isinstance(second, RenderError) else _without_tags(second)
            if second.replace(APART, "") == text:
                breaks = [place for place, letter in enumerate(second) if letter == APART]
                return {place - number - 1 for number, place in enumerate(breaks)}
        if forged_names:
            raise DataError(
                f"the chat template reads {', '.join(forged_names)} in a text of the user or of a tool, so that it cannot be told from "
                "the template's own; take it out of the text"
            )
        return set()

    def _marks_of_user(self, message: PreparedMessage) -> list[str]:
        """Return the names of marks in the texts of a message that is not trusted."""
        if message["role"] in TRUSTED_ROLES:
            return []
        texts = strings_of({key: value for key, value in message.items() if key != "role"})
        return [mark for text in texts for mark in self._guards[0].names_in(text)]

    def _split(self, text: str, answers: Sequence[tuple[int, int]], forged: Collection[int]) -> list[TemplateSegment]:
        """Split a text into segments at token names and at the edges of answers. forged: where names are ordinary text."""
        names = {match.start(): match.end() for match in self._marks.finditer(text)}
        marks = names.keys() - forged
        inside = {place for start, end in names.items() for place in range(start + 1, end)}
        edges = {edge for span in answers for edge in span} - inside
        cuts = sorted({0, len(text), *names, *names.values(), *edges})
        spans, pieces = sorted(answers, reverse=True), list[TemplateSegment]()
        for first, last in zip(cuts, cuts[1:]):
            while spans and spans[-1][1] <= first:
                spans.pop()
            pieces.append(TemplateSegment(text[first:last], bool(spans) and spans[-1][0] < last, first in marks))
        return pieces


def _cut_end(pieces: Sequence[TemplateSegment], length: int) -> list[TemplateSegment]:
    """Return segments without their last `length` characters."""
    retained = list(pieces)
    while length and retained:
        last = retained.pop()
        if len(last.text) > length:
            retained.append(replace(last, text=last.text[:-length]))
        length = max(0, length - len(last.text))
    return retained


def _pattern_of(marks: Collection[str]) -> re.Pattern[str]:
    """Return the expression that matches any of these names, the longest first."""
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)) or "(?!)")


@dataclass(frozen=True, slots=True)
class _Guard:
    """Finds names of marks in texts of others, and beginnings of names at their ends, which the next text might complete."""

    names: re.Pattern[str]
    beginnings: frozenset[str]

    @classmethod
    def of(cls, names: Collection[str]) -> _Guard:
        """Return the guard against these names."""
        return cls(_pattern_of(names), frozenset(name[:size] for name in names for size in range(1, len(name))))

    def names_in(self, text: str) -> list[str]:
        """Return the names in a text, and the beginning of one that it ends with."""
        longest = min(len(text), max(map(len, self.beginnings), default=0))
        ends = (text[-size:] for size in range(longest, 0, -1) if text[-size:] in self.beginnings)
        return [*self.names.findall(text), *islice(ends, 1)]

    def break_up(self, text: str) -> str:
        """Return a text with APART inside each name."""
        *_, last = ["", *self.names_in(text)]
        begun = len(last) if last in self.beginnings and text.endswith(last) else 0
        whole, rest = text[: len(text) - begun], text[len(text) - begun :]
        rest = rest[:1] + APART + rest[1:] if rest else ""
        return self.names.sub(lambda match: match[0][0] + APART + match[0][1:], whole) + rest


def _without_tags(text: str) -> str:
    """Return a text without the characters that {% generation %} leaves."""
    return text.replace(OPENS, "").replace(CLOSES, "")


def _spans_of_tags(text: str) -> list[tuple[int, int]]:
    """Return [start, end) of what stands in {% generation %}, in the text without the characters that say so."""
    spans: list[tuple[int, int]] = []
    start = length = 0
    for part in re.split(f"([{OPENS}{CLOSES}])", text):
        if part == OPENS:
            start = length
        elif part == CLOSES:
            spans.append((start, length))
        else:
            length += len(part)
    return spans


def _text_or_error(text: str | RenderError) -> str:
    """Return a rendered text; `DataError` if there is none."""
    if isinstance(text, RenderError):
        raise DataError(f"the chat template does not take the conversation: {text}")
    return text


def _refuse_reserved(*texts: str) -> None:
    """Raise `DataError` for a text that holds a reserved character."""
    if any(map(RESERVED.search, texts)):
        raise DataError("a message holds one of the characters U+FDD0 to U+FDD4, which are not text")
