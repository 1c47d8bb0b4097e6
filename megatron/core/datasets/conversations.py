"""Conversations in JSONL files: read, written down by a template, and kept as ids.

    chat.jsonl --template--> text --tokenizer--> ids, in chat.jsonl.cache/ChatDataset_indices

What a line may be says `conversation_rows.py`. A document is a line, a sequence a conversation. Ids are int32, and those that
are not learnt are kept as ~id, so that an id and whether it is an answer are one number. They are made once, by the first
process, and made again when the file, the tokenizer or the template has changed.
"""

from __future__ import annotations

import array
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.answer_spans import MARK_LIKE
from megatron.core.datasets.conversation_rows import ConversationRow, ConversationRowParser, TextRow
from megatron.core.datasets.index_map import Arrays, IndexCacheFolder, load_or_build_arrays
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.segment_encoder import SegmentEncoder
from megatron.core.datasets.special_tokens import token_ids_by_name
from megatron.core.datasets.templates import (
    BOS,
    DATE,
    EOS,
    FORMATS,
    ChatTemplate,
    Message,
    TemplateLimitError,
    TemplateSegment,
)
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields

AT_ONCE = 256  # lines that are tokenized together
MOST_TOLD = 20  # bad lines that an error names
_VERSION = 3  # of how ids are made of the same file, tokenizer and template
SHAPES = {"ids": ((None,), np.int32), "starts": ((None,), np.int64), "lines": ((None,), np.int64)}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """The segments of a row, and of its prompt alone if what is learnt is what differs from that. begin: ids before both."""

    segments: list[TemplateSegment]
    prompt: list[TemplateSegment] | None = None
    begin: tuple[int, ...] = ()


class ConversationEncoder:
    """Conversations to ids. template: the name of a format, or "tokenizer" for the tokenizer's own template. now: ISO time
    that a template is told; None: the clock's.

    The ids are those of transformers' `apply_chat_template`, but for names of marks in texts of the user and of tools.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, *, now: str | None = DATE) -> None:
        text = tokenizer.chat_template if template == "tokenizer" else FORMATS[template]
        if text is None:
            raise ConfigError(
                "--sft writes conversations by the tokenizer's chat template, and it has none; give --chat-template, "
                f"or --sft-tokenizer-prompt-format {', '.join(FORMATS)}"
            )
        self.tokenizer = tokenizer
        end = tokenizer.eod if tokenizer.eos is None else tokenizer.eos
        bos = "" if tokenizer.bos is None else tokenizer.id_to_token(tokenizer.bos) or BOS
        eos = tokenizer.id_to_token(end) or EOS
        tool_text = tokenizer.tool_chat_template if template == "tokenizer" else None
        special = {name: token for token in tokenizer.special_ids if len(name := tokenizer.id_to_token(token)) > 1}
        # Padding, and tokens that are special by the files beside tokenizer.json alone, are found in a text as well.
        special |= {
            name: tokenizer.special[name] for name in tokenizer.special.keys() & {*tokenizer.names_found_in_text}
        }
        self.marks = {**_tokens_of_template(tokenizer, text + (tool_text or "")), **special, eos: end}
        if tokenizer.bos is not None:
            self.marks[bos] = tokenizer.bos
        make_template = partial(
            ChatTemplate,
            bos=bos,
            eos=eos,
            marks=list(self.marks),
            control=list({*special, eos, bos} - {""}),
            names=_names_of_other_tokens(tokenizer),
            now=now,
        )
        self.template = make_template(text, for_tools=None if tool_text is None else make_template(tool_text))
        self._segments = SegmentEncoder(tokenizer, self.marks)
        self._eos = eos
        self.identity = {
            "tokenizer": tokenizer_fingerprint_fields(tokenizer)["hash"],
            "template": text,
            "template for tools": tool_text,
            "now": now,
            "version": _VERSION,
        }

    def encode_conversations(self, conversations: Sequence[Sequence[TemplateSegment]]) -> list[np.ndarray]:
        """Return the ids of each conversation, int32 [t]; an id that is not learnt is stored as ~id.

        `ValueError` for text that the tokenizer cannot encode.
        """
        return self._segments.encode(conversations)

    def render_row(self, row: ConversationRow | TextRow) -> RenderedRow:
        """Return the segments of a row. `DataError` from the template."""
        if isinstance(row, TextRow):
            end = "" if row.completion.endswith(self._eos) else self._eos
            whole, begin = row.prompt + row.completion + end, self.tokenizer.tokenize("")[: self._segments.frame[0]]
            if row.prompt.startswith(tuple(map(self.tokenizer.id_to_token, begin))):
                begin = []
            return RenderedRow(self.template.split_text(whole), self.template.split_text(row.prompt), tuple(begin))
        given = row.tools, row.variables
        if row.prompt is None:
            return RenderedRow(self.template.render_segments(row.messages, *given))
        return RenderedRow(
            self.template.render_unlearnt(row.messages, *given),
            self.template.render_with_generation_prompt(row.messages[: row.prompt], *given),
        )

    def encode_rows(self, rows: Sequence[RenderedRow]) -> list[np.ndarray]:
        """Return the ids of each row, int32 [t], ~id where not learnt. `ValueError` as in `encode_conversations`.

        Behind a prompt is learnt what follows the ids that the row and the prompt alone begin with.
        """
        prompts = [row.prompt for row in rows if row.prompt is not None]
        encoded = self.encode_conversations([*(row.segments for row in rows), *prompts])
        starts = iter(encoded[len(rows) :])
        learnt = (ids if row.prompt is None else _learn_behind(ids, next(starts)) for row, ids in zip(rows, encoded))
        return [np.concatenate([~np.array(row.begin, np.int32), ids]) for row, ids in zip(rows, learnt)]

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        invites: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation, up to where its next answer begins; continues: up to where its last answer goes
        on; else, without invites: to its end. `DataError` from the template, else `ValueError`.
        """
        if invites or continues:
            pieces = self.template.render_with_generation_prompt(messages, tools, variables, continues=continues)
        else:
            pieces = self.template.render_unlearnt(messages, tools, variables)
        (encoded,) = self.encode_conversations([pieces])
        return (encoded ^ (encoded >> 31)).tolist()  # an id that is not learnt is kept as ~id

    def answer_end_ids_and_texts(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return (token ids, texts) that the template puts after an answer; one of them ends generation.

        An id is that of the last mark behind an answer. Both are empty if the template ends answers by nothing, or rejects a
        conversation of two messages.
        """
        try:
            end = self.template.answer_end
        except DataError:
            return (), ()
        marks = self.template.marks_in(end)
        if marks:
            return (self.marks[marks[-1]],), ()
        return (), (end.strip(),) if end.strip() else ()


def _learn_behind(ids: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Return ids, int32 [t], of which those are learnt that follow what they and the prompt's ids begin with."""
    size = min(len(ids), len(prompt))
    shared = int(np.argmin(np.append(ids[:size] == prompt[:size], False)))
    return np.concatenate([ids[:shared], ~ids[shared:]])


def _names_of_other_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the variables of a template that name special tokens, but for those that begin and end a text."""
    tokens = {f"{name}_token": getattr(tokenizer, name) for name in ("pad", "cls", "sep", "mask")}
    return {name: tokenizer.id_to_token(token) for name, token in tokens.items() if token is not None}


def _tokens_of_template(tokenizer: Tokenizer, template: str) -> dict[str, int]:
    """Return the tokens that a template names, and say which of its marks are none."""
    words = set(MARK_LIKE.findall(template))
    tokens = token_ids_by_name(tokenizer, words)
    missing = sorted(word for word in words - tokens.keys() if word.startswith("<|"))
    if missing:
        logger.info(
            "the vocabulary has no token %s; what the template writes so is spelled with several", ", ".join(missing)
        )
    return tokens


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
    parser = ConversationRowParser()
    with open(path, "rb") as file:
        numbered = enumerate(file, 1)
        while rows := list(islice(numbered, AT_ONCE)):
            result: list[list[RenderedRow]] = []
            for number, line in rows:
                try:
                    result.append([encoder.render_row(row) for row in parser.parse_line(line)])
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
    _say_what_is_left_out(path, encoder, parser)
    return {
        "ids": np.frombuffer(ids, np.int32),
        "starts": np.frombuffer(starts, np.int64),
        "lines": np.frombuffer(lines, np.int64),
    }


def _say_what_is_left_out(path: str, encoder: ConversationEncoder, parser: ConversationRowParser) -> None:
    """Warn of what rows hold and nobody reads, once for a file."""
    if not encoder.template.marks_answers and not encoder.template.ends_answers:
        logger.warning(
            "%s: the chat template writes nothing behind the last answer of a conversation, so that its end is not learnt; "
            "earlier answers end with what begins the next message",
            path,
        )
    if parser.has_tools and not encoder.template.writes_tools:
        logger.warning("%s: the chat template writes nothing of the tools that rows have", path)
    if parser.unread_keys:
        logger.warning("%s: what rows hold besides is not read: %s", path, ", ".join(sorted(parser.unread_keys)))


def list_first_problems(problems: Sequence[str]) -> str:
    """Return the first problems, a line each, and how many more there are."""
    more = [f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else []
    return "\n".join(f"  {line}" for line in [*problems[:MOST_TOLD], *more])


def _encode_conversation_lines(
    encoder: ConversationEncoder, lines: Sequence[Sequence[RenderedRow]]
) -> list[list[np.ndarray] | str]:
    """Return the id sequences of each line, or instead a text saying what is wrong with it."""
    try:
        ids = iter(encoder.encode_rows(list(chain.from_iterable(lines))))
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
