"""Where the answers of a conversation stand in its text, for templates that do not mark them: found by what changes between
renderings.

    messages[:i] and the invitation to answer     <user>How?<end><assistant>
    messages[:i + 1]                              <user>How?<end><assistant>So.<end>
                                                                            ^^^^^^^^

Many templates write the past anew when a message follows: thoughts are dropped, the last answer has an end of its own. Then
the text behind a message is found instead, by a character that is put behind its content. In the whole conversation and in
the part up to an answer, what follows that character is the same for as long as both tell the same:

    whole             ...Q2|<end><assistant>A2<end><user>Q3...
    messages[:i]      ...Q2|<end><assistant>
                           |_______________|           the answer begins here
    whole             ...A2|<end><user>Q3...
    messages[:i + 1]  ...A2|<end><assistant>
                           |____|                      and ends here
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron.core.datasets.template_sandbox import RenderError

Message = Mapping[str, Any]
# Renders several (messages, whether the invitation to answer follows).
Render = Callable[[Sequence[tuple[Sequence[Message], bool]]], list[str | RenderError]]
PLACE = "\ufdd2"  # a character that Unicode keeps out of text
# Words that may be tokens: <|end|>, <s>, </s>, <<SYS>>, [INST], [/INST].
MARK_LIKE = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]+\]")
_LONGEST_MARK = 66
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class AnswerNotFoundError(Exception):
    """What an answer adds cannot be told. message: its number, from 1."""

    def __init__(self, message: int) -> None:
        super().__init__(f"message {message}")
        self.message = message


class AnswerFinder:
    """Finds answers in the texts that a template makes of one conversation and its beginnings."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._plain: dict[tuple[int, bool], str | RenderError] = {}  # by number of messages, and whether it invites

    def spans(self, messages: Sequence[Message], whole: str, *, answers_end: bool) -> list[tuple[int, int]]:
        """Return [start, end) of each answer in the text `whole` of a conversation. `AnswerNotFoundError`.

        answers_end: the template writes a mark after an answer; if not, the mark that begins the next message ends it.
        """
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        texts = self._render_plain([(messages[: place + after], not after) for place in answers for after in (0, 1)])
        result: list[tuple[int, int]] = []
        for place, before, through in zip(answers, texts[::2], texts[1::2]):
            start, end = self._start(messages, place, whole, before), self._end(messages, place, whole, before, through)
            if start > end:
                raise AnswerNotFoundError(place + 1)
            following = MARK_LIKE.match(whole, end)
            result.append((start, end if answers_end or following is None else following.end()))
        return result

    def text_after_answer(self, question: Message, answer: Message) -> tuple[str, str]:
        """Return what the template writes behind an answer: at the end of a conversation, and before another question."""
        conversation = [question, answer]
        texts = self._texts_behind(1, (conversation, False), ([*conversation, question], False))
        if texts is None:
            texts = self._texts_behind(1, (conversation, False))
        return (texts[0], texts[-1] if len(texts) > 1 else "") if texts else ("", "")

    def text_behind_last(self, messages: Sequence[Message]) -> str | None:
        """Return what the template writes behind the content of the last message; None if that cannot be told."""
        texts = self._texts_behind(len(messages) - 1, (messages, False))
        return texts[0] if texts else None

    def _start(self, messages: Sequence[Message], place: int, whole: str, before: str | RenderError) -> int:
        """Return where the answer begins: where the invitation to it ends, or the conversation differs from that."""
        if not isinstance(before, RenderError):
            shared = common_length(whole, before)
            if shared == len(before) or shared >= len(before) - len(self._invitation(messages[:place], before)):
                return shared
        if place:
            texts = self._texts_behind(place - 1, (messages, False), (messages[:place], True))
            if texts is not None:
                return len(whole) - len(texts[0]) + common_length(*texts)
        raise AnswerNotFoundError(place + 1)

    def _end(
        self, messages: Sequence[Message], place: int, whole: str, before: str | RenderError, through: str | RenderError
    ) -> int:
        """Return where the answer ends: what closes it is its own, what opens the next message is not."""
        if place == len(messages) - 1:
            return len(whole)
        if not isinstance(through, RenderError) and whole.startswith(through):
            return len(through)
        until = messages[: place + 1]
        texts = self._texts_behind(place, (messages, False), (until, True), (until, False))
        if texts is None:
            raise AnswerNotFoundError(place + 1)
        here, invited, last = texts
        invitation = "" if isinstance(before, RenderError) else self._invitation(messages[:place], before)
        closed = invited[: common_length(invited, last)]
        if invitation and invited.endswith(invitation):
            closed = invited.removesuffix(invitation)
        return len(whole) - len(here) + common_length(here, closed)

    def _invitation(self, messages: Sequence[Message], invited: str) -> str:
        """Return what the invitation to answer adds to the text of `messages`, "" if it changes more. invited: text with it."""
        (plain,) = self._render_plain([(messages, False)])
        if isinstance(plain, RenderError):
            return ""
        shared = common_length(invited, plain)
        return "" if MARK_LIKE.sub("", plain[shared:]).strip() else invited[shared:]

    def _render_plain(self, requests: Sequence[tuple[Sequence[Message], bool]]) -> list[str | RenderError]:
        """Return the texts of beginnings of the conversation, each rendered once."""
        keys = [(len(messages), invites) for messages, invites in requests]
        missing = {key: request for key, request in zip(keys, requests) if key not in self._plain}
        self._plain.update(zip(missing, self._render(list(missing.values()))))
        return [self._plain[key] for key in keys]

    def _texts_behind(self, place: int, *requests: tuple[Sequence[Message], bool]) -> list[str] | None:
        """Return, of each conversation, the text that follows the content of message number `place`, which is the same in
        all; None if that cannot be told.
        """
        plain = self._render_plain(requests)
        for changed in _with_place_behind(requests[0][0][place]):
            texts = self._render(
                [([*messages[:place], changed, *messages[place + 1 :]], invites) for messages, invites in requests]
            )
            if all(
                not isinstance(text, RenderError) and PLACE in text and text.replace(PLACE, "") == other
                for text, other in zip(texts, plain)
            ):
                # The first: the name of a tool may stand again in its reply.
                return [text.partition(PLACE)[2].replace(PLACE, "") for text in texts]
        return None


def common_length(text: str, other: str) -> int:
    """Return how many characters two texts begin with alike; a mark is not divided."""
    shared, differ = 0, min(len(text), len(other)) + 1
    while differ - shared > 1:
        middle = (shared + differ) // 2
        shared, differ = (middle, differ) if text[shared:middle] == other[shared:middle] else (shared, middle)
    for one in (text, other):
        for mark in MARK_LIKE.finditer(one, max(0, shared - _LONGEST_MARK), shared + _LONGEST_MARK):
            if mark.start() < shared < mark.end():
                shared = mark.start()
    return shared


def _with_place_behind(message: Message) -> Iterator[Message]:
    """Yield the message with `PLACE` within its last tool call, or else behind its text, or behind its thoughts."""
    calls, content = message.get("tool_calls"), message.get("content")
    if isinstance(calls, list) and calls and isinstance(calls[-1], Mapping):
        function = calls[-1].get("function", calls[-1])
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            named = {**function, "name": function["name"] + PLACE}
            last = {**calls[-1], "function": named} if "function" in calls[-1] else named
            yield {**message, "tool_calls": [*calls[:-1], last]}
    for changed in _contents_with_place_behind(content):
        yield {**message, "content": changed}
    thoughts = {name: message[name] for name in _THOUGHTS if isinstance(message.get(name), str)}
    if any(map(str.strip, thoughts.values())):
        yield {**message, **{name: _place_behind(value) for name, value in thoughts.items()}}


def _contents_with_place_behind(content: Any) -> Iterator[Any]:
    """Yield a text, or a list of parts, with `PLACE` behind it, and behind its last letter."""
    if isinstance(content, str):
        yield content + PLACE
        yield _place_behind(content)
    elif isinstance(content, list):
        texts = [number for number, part in enumerate(content) if isinstance(part, Mapping) and "text" in part]
        for number in texts[-1:]:
            for text in _contents_with_place_behind(content[number]["text"]):
                yield [*content[:number], {**content[number], "text": text}, *content[number + 1 :]]


def _place_behind(text: str) -> str:
    """Return the text with `PLACE` behind its last letter: some templates strip the space around a text."""
    bare = text.rstrip()
    return bare + PLACE + text[len(bare) :]
