"""Conversations in JSONL files: read, written down by a template, and kept as ids.

    chat.jsonl --template--> text --tokenizer--> ids, in chat.jsonl.cache/ChatDataset_indices

A line is {"messages": [{"role": "user", "content": "..."}, ...]}, with "tools" where the template knows them. A system
message that is not the first begins a new conversation. A document is a line, a sequence a conversation. Ids are int32, and
those that are not learnt are kept as ~id, so that an id and whether it is an answer are one number. They are made once, by
the first process, and made again when the file, the tokenizer or the template has changed.
"""

from __future__ import annotations

import array
import json
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from megatron.core.config.flags import ConfigError
from megatron.core.datasets.index_map import Arrays, IndexCacheFolder, load_or_build_arrays
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.special_tokens import count_ids_around_text, token_ids_by_name
from megatron.core.datasets.templates import (
    BOS,
    EOS,
    FORMATS,
    MARK_LIKE,
    ChatTemplate,
    Message,
    TemplateLimitError,
    TemplateSegment,
)
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields

AT_ONCE = 256  # lines that are tokenized together
MOST_TOLD = 20  # bad lines that an error names
SHAPES = {"ids": ((None,), np.int32), "starts": ((None,), np.int64), "lines": ((None,), np.int64)}

logger = logging.getLogger(__name__)


class ConversationEncoder:
    """Conversations to ids. template: the name of a format, or "tokenizer" for the tokenizer's own template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        text = tokenizer.chat_template if template == "tokenizer" else FORMATS[template]
        if text is None:
            raise ConfigError(
                "--sft writes conversations by the tokenizer's chat template, and it has none; give --chat-template, "
                f"or --sft-tokenizer-prompt-format {', '.join(FORMATS)}"
            )
        self.tokenizer, self._frame = tokenizer, count_ids_around_text(tokenizer)
        end = tokenizer.eod if tokenizer.eos is None else tokenizer.eos
        bos = "" if tokenizer.bos is None else tokenizer.id_to_token(tokenizer.bos) or BOS
        eos = tokenizer.id_to_token(end) or EOS
        words = set(MARK_LIKE.findall(text))
        special = {name: token for token in tokenizer.special_ids if len(name := tokenizer.id_to_token(token)) > 1}
        self.marks = {**token_ids_by_name(tokenizer, words), **special, eos: end}
        if tokenizer.bos is not None:
            self.marks[bos] = tokenizer.bos
        missing = sorted(word for word in words - self.marks.keys() if word.startswith("<|"))
        if missing:
            logger.info(
                "the vocabulary has no token %s; what the template writes so is spelled with several",
                ", ".join(missing),
            )
        self.template = ChatTemplate(text, bos=bos, eos=eos, marks=list(self.marks))
        self.identity = {"tokenizer": tokenizer_fingerprint_fields(tokenizer)["hash"], "template": text}

    def encode_conversations(self, conversations: Sequence[Sequence[TemplateSegment]]) -> list[np.ndarray]:
        """Return the ids of each conversation, int32 [t]; an id that is not learnt is stored as ~id.

        `ValueError` for text that the tokenizer cannot encode. Each segment is tokenized by itself, as a prompt is at
        inference. If the ids of (previous text + segment) begin with those of the previous text, the rest of them is
        used instead: some tokenizers put a space before every text.
        """
        texts = [
            (piece.text, previous.text + piece.text if previous is not None and not previous.mark else None)
            for conversation in conversations
            for previous, piece in zip((None, *conversation), conversation)
            if not piece.mark
        ]
        together = [text for pair in texts for text in pair if text is not None]
        flat, lengths = self.tokenizer.encode_texts_flat(together)
        before, after = self._frame
        ends = np.cumsum(lengths)
        spans = zip((ends - lengths + before).tolist(), (ends - after).tolist())
        ids = np.asarray(flat).astype(np.int32)
        encoded = (ids[first:last] for first, last in spans)
        return [self._join_segments(conversation, encoded) for conversation in conversations]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to its next answer. `DataError` from the template, else `ValueError`."""
        (encoded,) = self.encode_conversations([self.template.render_with_generation_prompt(messages)])
        return (~encoded).tolist()  # nothing of it is learnt

    def answer_end_ids_and_texts(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return (token ids, texts) that the template puts after an answer; one of them ends generation.

        Found by rendering a two-message conversation; both are empty if the template rejects it.
        """
        try:
            pieces = self.template.render_segments(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            )
        except DataError:
            return (), ()
        answer = [piece for piece in pieces if piece.answer]
        marks = [self.marks[piece.text] for piece in answer if piece.mark]
        words = [
            after.strip() for piece in answer if not piece.mark and (after := piece.text.partition("b")[2]).strip()
        ]
        return tuple(marks[:1]), () if marks else tuple(words[:1])

    def _join_segments(self, conversation: Sequence[TemplateSegment], encoded: Iterator[np.ndarray]) -> np.ndarray:
        """Return one conversation's ids, int32 [t], ~id where not learnt. encoded: what `encode` tokenized, in order."""
        parts: list[np.ndarray] = []
        before: np.ndarray | None = None  # ids of the text just before, by itself
        for piece in conversation:
            if piece.mark:
                ids, before = np.array([self.marks[piece.text]], np.int32), None
            else:
                alone = ids = next(encoded)
                if before is not None:
                    joint = next(encoded)
                    if np.array_equal(joint[: len(before)], before):
                        ids = joint[len(before) :]
                before = alone
            parts.append(ids if piece.answer else ~ids)
        return np.concatenate([np.empty(0, np.int32), *parts])


def parse_conversations(line: bytes) -> list[tuple[list[Message], Any]]:
    """Parse a JSONL line into (messages, tools) per conversation; [] for a blank line. `DataError` if it is invalid."""
    if not line.strip():
        return []
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise DataError(f"not JSON: {error}") from error
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError('no list of "messages"')
    _check_messages(messages)
    starts = [place for place, message in enumerate(messages) if place == 0 or message["role"] == "system"]
    result = [messages[first:last] for first, last in zip(starts, [*starts[1:], len(messages)])]
    for conversation in result:
        if all(message["role"] != "assistant" for message in conversation):
            raise DataError("a conversation without an answer: none of its messages has the role assistant")
    return [(conversation, row.get("tools")) for conversation in result]


def _check_messages(messages: Sequence[Any]) -> None:
    """Raise `DataError` for a message without a role, or with neither text nor tool calls."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'message {number} has no "role"')
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DataError(f'message {number} has no text as "content"')


class TokenizedConversations:
    """A token source of a JSONL file; see the top of this file for what the ids are."""

    def __init__(self, path: str, arrays: Arrays) -> None:
        self.prefix, self.arrays = path, arrays
        self.sequence_lengths, self.document_indices = np.diff(arrays["starts"]), arrays["lines"]

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids [offset, offset + length) of one conversation, cut off at its end; length None: to its end. int32"""
        first, last = self.arrays["starts"][sequence : sequence + 2].tolist()
        return self.arrays["ids"][first + offset : last if length is None else min(last, first + offset + length)]


def open_conversations(path: str, encoder: ConversationEncoder, cache: IndexCacheFolder) -> TokenizedConversations:
    """Tokenize a JSONL file of conversations, or map its cached ids. `DataError` names the first bad lines."""
    try:
        state = os.stat(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened: {error.strerror}; --sft reads JSONL files, so give whole names"
        ) from error
    if path.endswith((".gz", ".zst")):
        raise DataError(f"{path} is compressed; --sft reads plain JSONL")
    description = {**encoder.identity, "file": os.path.abspath(path), "bytes": state.st_size, "time": state.st_mtime_ns}
    return TokenizedConversations(
        path,
        load_or_build_arrays(
            cache, "Conversations", description, SHAPES, lambda: _tokenize_conversation_file(path, encoder)
        ),
    )


def _tokenize_conversation_file(path: str, encoder: ConversationEncoder) -> Arrays:
    """Tokenize a JSONL file of conversations. `DataError` names the first bad lines.

    Returns ids: int32 [t] of all conversations; starts: int64, where each begins in ids and, last, their end;
    lines: int64, the first conversation of each line and, last, the number of conversations.
    """
    # Machine integers, not Python's.
    ids, starts, lines = array.array("i"), array.array("q", [0]), array.array("q", [0])
    bad: list[tuple[int, str]] = []
    with open(path, "rb") as file:
        numbered = enumerate(file, 1)
        while rows := list(islice(numbered, AT_ONCE)):
            result: list[list[list[TemplateSegment]]] = []
            for number, line in rows:
                try:
                    result.append(
                        [encoder.template.render_segments(*conversation) for conversation in parse_conversations(line)]
                    )
                except TemplateLimitError as error:  # all lines would take as long
                    raise DataError(f"{path}, line {number}: {error}") from error
                except DataError as error:
                    bad.append((number, str(error)))
                    result.append([])
            for (number, _), sequences in zip(rows, _encode_conversation_lines(encoder, result)):
                if isinstance(sequences, str):
                    bad.append((number, sequences))
                    continue
                for sequence in sequences:
                    ids.frombytes(sequence.tobytes())
                    starts.append(len(ids))
                lines.append(len(starts) - 1)
    if bad:
        listed = list_first_problems([f"{path}, line {number}: {problem}" for number, problem in sorted(bad)])
        raise DataError(f"{len(bad)} lines cannot be used; mend or remove them\n{listed}")
    return {
        "ids": np.frombuffer(ids, np.int32),
        "starts": np.frombuffer(starts, np.int64),
        "lines": np.frombuffer(lines, np.int64),
    }


def list_first_problems(problems: Sequence[str]) -> str:
    """Return the first problems, a line each, and how many more there are."""
    more = [f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else []
    return "\n".join(f"  {line}" for line in [*problems[:MOST_TOLD], *more])


def _encode_conversation_lines(
    encoder: ConversationEncoder, lines: Sequence[Sequence[Sequence[TemplateSegment]]]
) -> list[list[np.ndarray] | str]:
    """Return the id sequences of each line, or instead a text saying what is wrong with it."""
    try:
        ids = iter(encoder.encode_conversations(list(chain.from_iterable(lines))))
    except ValueError as error:
        if len(lines) == 1:  # half of a surrogate pair, say
            return [f"text that the tokenizer does not take: {error}"]
        return [result for line in lines for result in _encode_conversation_lines(encoder, [line])]
    result: list[list[np.ndarray] | str] = []
    for line in lines:
        sequences = list(islice(ids, len(line)))
        silent = any(not (sequence[1:] >= 0).any() for sequence in sequences)
        result.append("a conversation whose answers have no tokens" if silent else sequences)
    return result
