"""Ids of what an environment says: text as it stands, or messages by a chat template. What the policy sampled keeps its ids.

    text        <s> Reverse abcd:                         names of special tokens in it are those tokens; BOS once, where the rollout begins
    messages    <s> <user> Reverse abcd. <end> <assistant>
    behind an answer, which ended with <end>
                <user> And efgh? <end> <assistant>        what the template puts behind the answer, and no more

Templates may write an earlier answer anew when a message follows, such as without its thoughts. The policy has seen its answer as it
sampled it, and so it stays: only what follows an answer is taken from the template, from a rendering with a word in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.special_tokens import count_ids_around_text
from megatron.core.datasets.templates import TemplateSegment
from megatron.core.tokenizers.base import Tokenizer

Message = Mapping[str, Any]
_PLACE = "AnswerOfThePolicy"  # stands for an answer; letters only, which no template trims or escapes


def text_prompt_ids(tokenizer: Tokenizer, text: str, *, answer: str | None) -> list[int]:
    """Return the ids of a text of an environment: [tokens]. Names of special tokens in it become those tokens.

    answer: the text of the answer that it follows, "" where that ended with a special token; None at the beginning of a
    rollout, which gets what the tokenizer puts before every text, once. `ValueError` for text that cannot be encoded.
    """
    alone = tokenizer.tokenize_with_special(text)
    if answer is None:
        begin = tokenizer.tokenize("")[: count_ids_around_text(tokenizer)[0]]
        return alone if alone[: len(begin)] == begin else [*begin, *alone]
    if not answer:
        return alone
    # Some tokenizers put a space before every text, and none belongs between an answer and what follows it.
    try:
        before, whole = (tokenizer.tokenize_with_special(part) for part in (answer, answer + text))
    except ValueError:  # two numbers of NullTokenizer side by side, say
        return alone
    return whole[len(before) :] if whole[: len(before)] == before else alone


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended. token: the id that ended it, None without one. word: the stop word that ended it, or ""."""

    token: int | None = None
    word: str = ""


class ChatPrompts:
    """Messages as prompts by a chat template. template: name of a format, or "tokenizer" for the tokenizer's own.

    stop_ids, stop_words: what ends an answer.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._encoder = ConversationEncoder(tokenizer, template)
        self.stop_ids, self.stop_words = self._encoder.answer_end_ids_and_texts()

    def prompt_ids_and_text(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], str]:
        """Return ids [tokens] and text of messages without an answer of the policy, up to its next one. `DataError` if
        the template does not take them.
        """
        segments = self._encoder.template.render_with_generation_prompt(messages, tools)
        return self._encode(segments), "".join(segment.text for segment in segments)

    def ids_after_answer(
        self, messages: Sequence[Message], answer: int, end: AnswerEnd, tools: Any = None
    ) -> list[int]:
        """Return the ids that the template puts after message `answer`, the policy's last, up to its next answer; without
        the end that was sampled. `DataError` as above.
        """
        placed = [*messages[:answer], {"role": "assistant", "content": _PLACE}, *messages[answer + 1 :]]
        segments = self._encoder.template.render_with_generation_prompt(placed, tools)
        at = [place for place, segment in enumerate(segments) if _PLACE in segment.text]
        if not at:
            raise DataError("the chat template leaves out an earlier answer, so that nothing can follow it")
        rest = segments[at[-1]].text.rpartition(_PLACE)[2]
        if end.word and end.word in rest:
            rest = rest.partition(end.word)[2]
        follows = [TemplateSegment(rest, False), *segments[at[-1] + 1 :]]
        for place, segment in enumerate(follows if end.token is not None else ()):
            if segment.mark and self._encode([segment]) == [end.token]:
                return self._encode(follows[place:])[1:]  # as behind the end: some marks take the space behind them
            if not segment.mark and segment.text.strip():
                break
        return self._encode(follows)

    def _encode(self, segments: Sequence[TemplateSegment]) -> list[int]:
        (ids,) = self._encoder.encode_conversations([[segment for segment in segments if segment.text]])
        return np.where(ids < 0, ~ids, ids).tolist()  # learnt or not is said by who wrote it


@lru_cache(maxsize=8)
def chat_prompts(tokenizer: Tokenizer, template: str | None) -> ChatPrompts:
    """Return the prompts of a template, made once. None: the tokenizer's own, or ChatML if it has none. `ConfigError`
    for "tokenizer" where it has none.
    """
    return ChatPrompts(tokenizer, template or ("tokenizer" if tokenizer.chat_template else "chatml"))
