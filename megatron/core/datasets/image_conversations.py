"""Conversations about images, in LLaVA's JSON files: read, written down by a template, and kept as ids with a slot for every row.

    {"image": "cat.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat?"}, {"from": "gpt", "value": "A cat."}]}

    ids         <user> [slot] [slot] [slot] [slot] \\n What ? <end> <bot> A cat . <end>

An image takes as many slots as its tiles have rows for the language model; so lengths, packing, labels and masks see what the
network will see. A slot is the id `SLOT`, as ~id, since it is never learnt. Rows whose images cannot be used are left out, counted
and named; so are those that are no conversations, as in `conversations.py`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.datasets.conversations import (
    AT_ONCE,
    SHAPES,
    ConversationEncoder,
    TokenizedConversations,
    list_first_problems,
)
from megatron.core.datasets.images import ImageError, ImageOptions, TileGrid, read_image_bytes, tile_grid_of_image_bytes
from megatron.core.datasets.index_map import Arrays, IndexCacheFolder, load_or_build_arrays
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.special_tokens import IMAGE
from megatron.core.datasets.storage import read_text_lines
from megatron.core.datasets.templates import Message, TemplateSegment

SLOT = 1 << 30  # the id of a slot, which no vocabulary reaches
_CHARACTER = "\ufdd5"  # an image while a template runs; no text holds it
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_READER = 2  # raised where the same file gives other ids than before
_UNREADABLE = ("video", "videos", "audio", "audios", "tools")
# What rows of published sets hold besides, and why it changes nothing.
_HARMLESS = MappingProxyType(
    {
        **dict.fromkeys(
            ("id", "question_id", "source", "data_source", "dataset", "model", "type"), "where a row comes from"
        ),
        **dict.fromkeys(("width", "height", "width_list", "height_list"), "sizes, which the images have themselves"),
    }
)
_SHAPES = {
    **SHAPES,
    "image_starts": ((None,), np.int64),
    "tiles": ((None,), np.int32),
    "names": ((None,), np.uint8),
    "name_ends": ((None,), np.int64),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageTokenLayout:
    """Which tokens stand for an image in a sequence. rows: embedding rows (slots) of a tile. tags: ids before each
    tile, the last of them before a thumbnail. around: ids before and after an image.

    places: ids before the tile of each row and column (SmolVLM; `around` is then around the thumbnail). ends: ids after
    each row of tiles, and after the last row.
    """

    rows: int
    tags: tuple[tuple[int, ...], ...] = ()
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    places: tuple[tuple[tuple[int, ...], ...], ...] = ()
    ends: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def image_tokens(self, grid: TileGrid) -> np.ndarray:
        """Return the ids of an image cut into `grid`, each as ~id, with `SLOT` for each embedding row. int32 [t]"""
        ids: list[int] = []
        tiles = grid.num_tiles
        if self.places and tiles > 1:
            for row in range(grid.rows):
                for place in self.places[row][: grid.columns]:
                    ids += [*place, *[SLOT] * self.rows]
                ids += self.ends[row == grid.rows - 1]
            tiles -= grid.columns * grid.rows
        ids += self.around[0]
        for tile in range(tiles):
            if self.tags:
                ids += self.tags[-1] if grid.thumbnail and tile == tiles - 1 else self.tags[tile]
            ids += [SLOT] * self.rows
        return ~np.array([*ids, *self.around[1]], np.int32)


class ImageConversationEncoder:
    """Writes conversations about images as ids. plain: of what the user says only the images are kept."""

    def __init__(self, encoder: ConversationEncoder, slots: ImageTokenLayout, *, plain: bool) -> None:
        self.encoder, self.slots, self.plain = encoder, slots, plain
        encoder.marks[_CHARACTER] = SLOT

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """What the ids depend on."""
        return {**self.encoder.identity, **asdict(self.slots), "plain": self.plain}

    def expand_image_slots(self, ids: np.ndarray, grids: Sequence[TileGrid]) -> np.ndarray:
        """Replace each image mark in the ids of a conversation by the tokens of that image.

        ids: int32 [t]; grids: the tile grid of each image. Returns int32 [t'].
        """
        parts = np.split(ids, np.flatnonzero(ids == ~SLOT))
        result = [parts[0]]
        for part, grid in zip(parts[1:], grids, strict=True):
            result += [self.slots.image_tokens(grid), part[1:]]
        return np.concatenate(result)

    def encode_prompt_ids(self, messages: Sequence[Message], grids: Sequence[TileGrid]) -> np.ndarray:
        """Return the ids of a conversation up to where the answer begins, with `SLOT` at image slots. int64 [t]

        grids: the tile grid of each image. `DataError` if their number is not that of the image marks.
        """
        turns = [_parse_turn(message, place) for place, message in enumerate(messages, 1)]
        own = [{"role": role, "content": _replace_image_tags(role, text, plain=self.plain)} for role, text in turns]
        marks = sum(message["content"].count(_CHARACTER) for message in own)
        if marks != len(grids):
            raise DataError(f"the user says {IMAGE} {marks} times, and there are {len(grids)} images")
        (ids,) = self.encoder.encode_conversations(
            [list(_split_at_images(self.encoder.template.render_with_generation_prompt(own)))]
        )
        whole = self.expand_image_slots(ids, grids).astype(np.int64)
        return whole ^ (whole >> 63)


class ImageConversationTokenSource(TokenizedConversations):
    """The conversations of a JSON file, with their images. folder: of the images' paths."""

    def __init__(self, path: str, folder: str, arrays: Arrays) -> None:
        super().__init__(path, arrays)
        self.folder = folder

    def image_paths_and_tile_counts(self, sequence: int) -> list[tuple[str, int]]:
        """Path and number of tiles of each image of a conversation, in order."""
        first, last = self.arrays["image_starts"][sequence : sequence + 2].tolist()
        ends, result = self.arrays["name_ends"], []
        for place in range(first, last):
            start = int(ends[place - 1]) if place else 0
            name = self.arrays["names"][start : int(ends[place])].tobytes().decode()
            result.append((os.path.join(self.folder, name), int(self.arrays["tiles"][place])))
        return result


@dataclass(frozen=True, slots=True)
class ConversationRowSource:
    """Where conversation rows come from. path: named in messages. folder: base of image paths. identity: for the cache
    key.

    read: yields each row as LLaVA's JSON object, as an `ImageConversationRow`, or as a text saying why it is left out.
    """

    path: str
    folder: str
    identity: Mapping[str, Any]
    read: Callable[[], Iterable[Any]]


def json_row_source(path: str, folder: str) -> ConversationRowSource:
    """The rows of a JSON file."""
    try:
        state = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} cannot be opened: {error.strerror}; give the whole name of a JSON file") from error
    identity = {"file": os.path.abspath(path), "bytes": state.st_size, "time": state.st_mtime_ns}
    return ConversationRowSource(path, folder, identity, lambda: _read_json_rows(path))


def open_image_conversations(
    source: ConversationRowSource, writer: ImageConversationEncoder, options: ImageOptions, cache: IndexCacheFolder
) -> ImageConversationTokenSource:
    """Tokenize conversations, or map their cached ids. `DataError` names rows that are no conversations."""
    description = {
        **writer.fingerprint_fields,
        **source.identity,
        "images": {**asdict(options), "folder": os.path.abspath(source.folder)},
        "reader": _READER,
    }
    arrays = load_or_build_arrays(
        cache,
        "ImageConversations",
        description,
        _SHAPES,
        _ImageConversationBuilder(source, writer, options).build_arrays,
    )
    return ImageConversationTokenSource(source.path, source.folder, arrays)


@dataclass(frozen=True, slots=True)
class ImageConversationRow:
    """A conversation and the paths of its images, in order. ids: int32 [t], where it is written already, ~SLOT for an image."""

    messages: list[Message]
    images: list[str]
    ids: np.ndarray | None = None


class _ImageConversationBuilder:
    """Makes the arrays of a source. bad: rows that are no conversations, unreadable: those whose images cannot be used."""

    def __init__(self, source: ConversationRowSource, writer: ImageConversationEncoder, options: ImageOptions) -> None:
        self.source, self.writer, self.options = source, writer, options
        self.unread_keys: dict[str, None] = {}
        self.bad: list[tuple[int, str]] = []
        self.unreadable: list[tuple[int, str]] = []

    def build_arrays(self) -> Arrays:
        """Tokenize all rows and read the header of every image; return the arrays of `_SHAPES`."""
        ids: list[np.ndarray] = []
        names: list[bytes] = []
        tiles: list[int] = []
        starts, lines, image_starts = [0], [0], [0]
        rows = enumerate(self.source.read(), 1)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            while given := list(islice(rows, AT_ONCE)):
                batch = [(number, self._parse_row(number, row)) for number, row in given]
                grids = list(pool.map(lambda entry: self._read_tile_grids(entry[1]), batch))
                pieces = self._render_row_segments(batch, grids)
                encoded = iter(self.writer.encoder.encode_conversations([one for one in pieces if one]))
                for (_, row), piece, cut in zip(batch, pieces, grids, strict=True):
                    if piece is not None and row is not None and not isinstance(cut, str):
                        own = next(encoded) if row.ids is None else row.ids
                        ids.append(self.writer.expand_image_slots(own, cut))
                        starts.append(starts[-1] + len(ids[-1]))
                        names += [name.encode() for name in row.images]
                        tiles += [grid.num_tiles for grid in cut]
                        image_starts.append(len(tiles))
                    lines.append(len(starts) - 1)
        self._report_bad_rows(len(lines) - 1)
        return {
            "ids": np.concatenate([np.empty(0, np.int32), *ids]),
            "starts": np.array(starts, np.int64),
            "lines": np.array(lines, np.int64),
            "image_starts": np.array(image_starts, np.int64),
            "tiles": np.array(tiles, np.int32),
            "names": np.frombuffer(b"".join(names), np.uint8),
            "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        }

    def _parse_row(self, number: int, row: Any) -> ImageConversationRow | None:
        """Parse a row; None if it cannot be used, which is noted with its number."""
        if isinstance(row, ImageConversationRow):
            return row
        if isinstance(row, str):
            self.unreadable.append((number, row))
            return None
        try:
            return _parse_conversation_row(row, plain=self.writer.plain, unread=self.unread_keys)
        except DataError as error:
            self.bad.append((number, str(error)))
            return None

    def _read_tile_grids(self, row: ImageConversationRow | None) -> list[TileGrid] | str:
        """Return the tile grid of each image of a conversation, or a text saying which image cannot be used and why."""
        grids = []
        for name in row.images if row is not None else ():
            try:
                grids.append(
                    tile_grid_of_image_bytes(
                        read_image_bytes(os.path.join(self.source.folder, name), self.options), self.options
                    )
                )
            except ImageError as error:
                return f"{name}: {error}"
        return grids

    def _render_row_segments(
        self, batch: Sequence[tuple[int, ImageConversationRow | None]], grids: Sequence[list[TileGrid] | str]
    ) -> list[list[TemplateSegment] | None]:
        """Return each conversation's template segments: [] if it has ids already, None if it cannot be used (noted)."""
        result: list[list[TemplateSegment] | None] = []
        for (number, row), cut in zip(batch, grids, strict=True):
            result.append(None)
            if row is None:
                continue
            if isinstance(cut, str):
                self.unreadable.append((number, cut))
                continue
            try:
                template = self.writer.encoder.template
                result[-1] = list(_split_at_images(template.render_segments(row.messages))) if row.ids is None else []
            except DataError as error:
                self.bad.append((number, str(error)))
        return result

    def _report_bad_rows(self, total: int) -> None:
        """Raise `DataError` for rows that are no conversations; warn of those whose images cannot be used, of `total`."""
        path = self.source.path
        if self.unread_keys:
            logger.warning("%s: what rows hold besides is not read: %s", path, ", ".join(sorted(self.unread_keys)))
        if self.bad:
            listed = list_first_problems([f"{path}, row {number}: {problem}" for number, problem in sorted(self.bad)])
            raise DataError(f"{len(self.bad)} rows cannot be used; mend or remove them\n{listed}")
        if self.unreadable:
            logger.warning(
                "%s: %d of %d rows are left out, since they or an image of theirs cannot be used\n%s",
                path,
                len(self.unreadable),
                total,
                list_first_problems([f"row {number}: {problem}" for number, problem in sorted(self.unreadable)]),
            )


def _read_json_rows(path: str) -> list[Any]:
    """The rows of a JSON list, or of a file with a JSON object a line."""
    try:
        lines = read_text_lines(path)
        if next((line for line in lines if line.strip()), "").lstrip()[:1] == "[":
            return json.loads("\n".join(lines))
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is neither a JSON list nor a file of JSON lines: {error}") from error


def _parse_conversation_row(row: Any, *, plain: bool, unread: dict[str, None]) -> ImageConversationRow:
    """Parse a row of LLaVA's (or OpenAI's) JSON into messages and image paths. `DataError` if it is invalid.

    plain: of user messages keep the images only. unread: names of keys that are passed over are put there.
    """
    keys = ForeignMapping(row if isinstance(row, Mapping) else {}, harmless=_HARMLESS)
    turns, images = _take_turns(keys), _take_image_paths(keys)
    messages: list[Message] = []
    marks = 0
    for place, turn in enumerate(turns, 1):
        role, text = _parse_turn(turn, place, unread)
        text = _replace_image_tags(role, text, plain=plain)
        marks += text.count(_CHARACTER)
        messages.append({"role": role, "content": text})
    if marks != len(images):
        raise DataError(f"the user says {IMAGE} {marks} times, and there are {len(images)} images")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("a conversation without an answer: none of its turns is of the assistant")
    unread.update(dict.fromkeys(map(str, keys.keys_left())))
    return ImageConversationRow(messages, images)


def _take_turns(keys: ForeignMapping) -> list[Any]:
    """Take the turns of a row, with the system's text first. `DataError` if there are none, or what is no text or image."""
    turns = _take_one_of(keys, "conversations", "messages")
    if not isinstance(turns, list) or not turns:
        raise DataError('no list of "conversations"')
    if other := [name for name in _UNREADABLE if keys.pop_or_none(name)]:
        raise DataError(f'"{other[0]}" is not read; conversations are about images')
    system = keys.pop_or_none("system")
    return [{"from": "system", "value": system}, *turns] if system else turns


def _take_image_paths(keys: ForeignMapping) -> list[str]:
    images = _take_one_of(keys, "image", "images") or []
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        raise DataError('"image" is neither a path nor a list of paths')
    return images


def _take_one_of(keys: ForeignMapping, name: str, other: str) -> Any:
    """Take the value of one of two names. `DataError` if both are given."""
    values = keys.pop_or_none(name), keys.pop_or_none(other)
    if None not in values:
        raise DataError(f'"{name}" and "{other}": keep one')
    return values[1] if values[0] is None else values[0]


def _replace_image_tags(role: str, text: str, *, plain: bool) -> str:
    """Return the text with `<image>` replaced by the mark character in user messages; plain: the marks alone."""
    if role != "user":
        return text
    return _CHARACTER * text.count(IMAGE) if plain else text.replace(IMAGE, _CHARACTER)


def _parse_turn(turn: Any, place: int, unread: dict[str, None] | None = None) -> tuple[str, str]:
    """Return role and text of turn number `place`, in LLaVA's or OpenAI's format. `DataError` if it is invalid.

    unread: names of keys that are passed over are put there.
    """
    if not isinstance(turn, Mapping):
        raise DataError(f"turn {place} is no object")
    keys = ForeignMapping(turn, defaults={"weight": 1})
    role, text = (_take_one_of(keys, *names) for names in (("from", "role"), ("value", "content")))
    text = _text_of_parts(text, place) if isinstance(text, list) else text
    if not isinstance(role, str) or role not in _ROLES or not isinstance(text, str):
        raise DataError(f'turn {place} has no "from" that is human, gpt or system with a "value"')
    if _CHARACTER in text:
        raise DataError(f"turn {place} holds the character U+FDD5, which is not text")
    if keys.pop_or_none("weight") not in (None, 1):
        raise DataError(f'turn {place} has a "weight"; all answers are learnt, so leave it out')
    if unread is not None:
        unread.update({f"{name} (of turns)": None for name in keys.keys_left()})
    return _ROLES[role], text


def _text_of_parts(parts: Sequence[Any], place: int) -> str:
    """Return the text of content in parts, with `<image>` for each image. `DataError` for parts of other kinds."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else IMAGE if kind == "image" and part.keys() <= {"type"} else None
        if not isinstance(text, str):
            raise DataError(
                f'turn {place} holds the part {short_value(part)}; parts are {{"type": "text", "text": ...}} and {{"type": "image"}}, '
                'whose path stands in "images"'
            )
        texts.append(text)
    return "".join(texts)


def _split_at_images(pieces: Sequence[TemplateSegment]) -> Iterator[TemplateSegment]:
    """Yield the segments with each image mark as a segment of its own."""
    for piece in pieces:
        if piece.mark:
            yield piece
            continue
        for place, part in enumerate(piece.text.split(_CHARACTER)):
            if place:
                yield TemplateSegment(_CHARACTER, answer=False, mark=True)
            if part:
                yield TemplateSegment(part, piece.answer)
