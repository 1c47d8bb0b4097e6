"""Samples of conversations about images: those of `chat.py`, with the images and where their rows stand.

    tokens        <user> 0 0 0 0 \\n What ? <end> <bot> A cat . | <user> 0 0 0 0 ...
    image_slots   -1     0 1 2 3 -1 -1 ...                        -1     4 5 6 7 ...

Which conversations share a sample depends on their lengths with images and on the seed alone. An image that turns out to be
damaged when it is unpacked becomes a black one, and its conversation has no loss; it is counted and named once.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.multimodal import MultimodalDataConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.chat import ChatDataset
from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.dataset_protocols import DatasetKind, Sample, SplitRequest, TokenSpan
from megatron.core.datasets.energon import META, EnergonSplitPart
from megatron.core.datasets.image_conversations import (
    SLOT,
    ConversationRowSource,
    ImageConversationEncoder,
    ImageConversationTokenSource,
    ImageTokenLayout,
    json_row_source,
    open_image_conversations,
)
from megatron.core.datasets.images import (
    ImageError,
    ImageOptions,
    decode_image,
    empty_image_batch,
    read_image_bytes,
    tile_image,
)
from megatron.core.datasets.index_map import IndexCacheFolder
from megatron.core.datasets.mock import MockConversations
from megatron.core.datasets.multimodal_bin_idx import bin_idx_row_source, is_bin_idx_pair
from megatron.core.datasets.special_tokens import IMAGE, encode_without_special_tokens, token_ids_by_name
from megatron.core.datasets.storage import DataError
from megatron.core.datasets.webdataset import energon_fingerprint_fields, read_energon_rows
from megatron.core.tokenizers.base import Tokenizer

# What a rank needs of images: their pixels (first stage), whether they are sound (the stage of the loss), or nothing.
Use = Literal["pixels", "check", "nothing"]

# Text before and after an image.
IMAGE_TAGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "nvlm": ("<Image>", "</Image>"),
        "internvl": ("<img>", "</img>"),
        "smolvlm": ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
    }
)
_PLACE = "<fake_token_around_image><row_{row}_col_{column}>"  # before each of SmolVLM's tiles
_ROW_ENDS = "\n", "\n\n"  # behind a row of them, and behind the last
MOST_IN_A_ROW = 8  # damaged images, after which a run ends: with no sound one in a batch its loss would be no number

logger = logging.getLogger(__name__)


class DamagedImages:
    """Counts images that cannot be unpacked, and names each once. When none of the last ones could be, the run ends."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._in_a_row = 0
        self._lock = threading.Lock()

    def add(self, name: str, reason: str) -> None:
        """Note a damaged image. `DataError` if its folder is gone, or for the `MOST_IN_A_ROW`th of them in a row."""
        with self._lock:
            self._in_a_row += 1
            if name not in self.names:
                self.names[name] = reason
                logger.warning("%s: %s; its conversation has no loss (%d so far)", name, reason, len(self.names))
        holder = os.path.dirname(name.partition("@")[0] if "@" in name else name)
        if not os.path.isdir(holder):
            raise DataError(
                f"{holder} is gone, which held images when the data were indexed: {name}; bring it back and resume"
            )
        if self._in_a_row >= MOST_IN_A_ROW:
            raise DataError(
                f"none of the last {self._in_a_row} images can be used, the last {name}: {reason}; see to the files and resume"
            )

    def note_usable(self) -> None:
        """Note that an image could be used, which ends a row of damaged ones."""
        self._in_a_row = 0


class MockImageConversations:
    """Made-up conversations, each behind a made-up image. rows: slots of an image."""

    def __init__(self, conversations: MockConversations, rows: int, options: ImageOptions) -> None:
        self._conversations, self.rows, self.options = conversations, rows, options
        self.prefix, self.document_indices = conversations.prefix, conversations.document_indices
        self.sequence_lengths = conversations.sequence_lengths + rows

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids [offset, offset + length) of one conversation, to its end when `length` is None. int64"""
        whole = np.concatenate([np.full(self.rows, ~SLOT), self._conversations.get(sequence)])
        return whole[offset : None if length is None else offset + length]

    def image_paths_and_tile_counts(self, sequence: int) -> list[tuple[str, int]]:
        """Return [(name, number of tiles)] of the conversation's only image: its number as a text, and 1."""
        return [(str(sequence), 1)]

    def pixels(self, name: str) -> np.ndarray:
        """The image of a name: noise. float32 [1, channels, height, width]"""
        shape = empty_image_batch(self.options).shape[1:]
        return np.random.default_rng(int(name)).standard_normal((1, *shape)).astype(np.float32)


class ImageChatDataset:
    """The samples of a `ChatDataset` of conversations about images.

    rows: of a tile. use: what is read of images. filler: the id that stands at slots, whose embedding is not used. A sample also
    holds image_slots (int64 [L]), images (float32 [n, channels, height, width]) and image_rows, the number of all their rows.
    """

    def __init__(
        self,
        chat: ChatDataset,
        source: ImageConversationTokenSource | MockImageConversations,
        options: ImageOptions,
        *,
        rows: int,
        use: Use = "pixels",
        filler: int = 0,
    ) -> None:
        self.chat, self.source, self.options = chat, source, options
        self.rows, self.use, self.filler = rows, use, filler
        self.prefix, self.description = chat.prefix, chat.description
        self.tokens_per_epoch, self.samples_per_epoch = chat.tokens_per_epoch, chat.samples_per_epoch
        self.damaged = DamagedImages()

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.chat)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample in shuffled order."""
        sample = self.chat[index]
        tokens, labels, mask = sample["tokens"], sample["labels"], sample["loss_mask"]
        is_slot = tokens == SLOT
        slots = np.full(len(tokens), -1, np.int64)
        images, first = [empty_image_batch(self.options)], 0
        for span in self.chat.token_sources(index):
            place = slice(span.start, span.start + span.length)
            number = int(is_slot[place].sum())
            slots[place][is_slot[place]] = first + np.arange(number)
            names, seen = self._images_within_slots(span.sequence, number)
            first += seen * self.rows
            for name, count in names:
                try:
                    images.append(self._read_tiles_of_image(name, count))
                    self.damaged.note_usable()
                except ImageError as error:
                    self.damaged.add(name, str(error))
                    mask[place] = 0
                    images.append(np.zeros((count, *images[0].shape[1:]), np.float32))
        tokens[is_slot], labels[labels == SLOT] = self.filler, self.filler
        if self.use != "pixels":
            return sample
        return {
            **sample,
            "image_slots": slots,
            "images": np.concatenate(images),
            "image_rows": np.array(first, np.int64),
        }

    def token_sources(self, index: int) -> list[TokenSpan]:
        """Which conversations stand in the index-th sample, and their images."""
        result = []
        for span in self.chat.token_sources(index):
            slots = int((self.source.get(span.sequence, span.offset, span.length) == ~SLOT).sum())
            names, _ = self._images_within_slots(span.sequence, slots)
            result.append(replace(span, images=tuple(name for name, _ in names)))
        return result

    def samples_with_document(self, document: int) -> np.ndarray:
        """The samples with a conversation of this document, in rising order. int64 [samples]"""
        return self.chat.samples_with_document(document)

    def _images_within_slots(self, conversation: int, slots: int) -> tuple[list[tuple[str, int]], int]:
        """Return (path, tiles) of a conversation's images within its first `slots` slots, and the sum of the tiles."""
        result, tiles_seen = [], 0
        for name, count in self.source.image_paths_and_tile_counts(conversation):
            if tiles_seen * self.rows >= slots:  # what comes behind was cut off
                break
            result.append((name, count))
            tiles_seen += count
        return result, tiles_seen

    def _read_tiles_of_image(self, name: str, count: int) -> np.ndarray:
        """Read an image and cut it into `count` tiles, float32 [count, channels, height, width]; an empty batch unless
        `use` is "pixels". `ImageError` if it cannot be used or has another number of tiles.
        """
        if self.use == "nothing":
            return empty_image_batch(self.options)
        if isinstance(self.source, MockImageConversations):
            return self.source.pixels(name)
        image = decode_image(read_image_bytes(name, self.options), self.options)
        if self.use == "check":
            return empty_image_batch(self.options)
        result = tile_image(image, self.options)
        if len(result) != count:
            raise ImageError(f"it has {len(result)} tiles, and had {count} when lengths were counted")
        return result


@dataclass(frozen=True, slots=True)
class ImageChatDatasetKind(DatasetKind):
    """Conversations about images; --split counts the rows of a file, which are the documents."""

    run: RunConfig
    tokenizer: Tokenizer
    writer: ImageConversationEncoder | None  # of made-up conversations none
    options: ImageOptions
    use: Use
    name: str = ImageChatDataset.__name__

    def open(self, prefix: str) -> ImageConversationTokenSource | MockImageConversations:
        """The ids of a file's conversations, or made-up ones."""
        if self.writer is None:
            made_up = MockConversations(self.tokenizer.vocab_size, self.tokenizer.eod)
            return MockImageConversations(made_up, self.run.model.vision.num_image_embeddings, self.options)
        return open_image_conversations(
            self._row_source_of_prefix(prefix), self.writer, self.options, self._index_cache(prefix)
        )

    def _row_source_of_prefix(self, prefix: str) -> ConversationRowSource:
        """Return the rows behind a prefix: a part of an Energon folder, a .bin/.idx pair, or a JSON file."""
        part = EnergonSplitPart.parse_data_path(prefix)
        if part is not None:
            return ConversationRowSource(
                prefix, part.folder, energon_fingerprint_fields(part), lambda: read_energon_rows(part)
            )
        if is_bin_idx_pair(prefix):
            return bin_idx_row_source(prefix, self.tokenizer)
        folder = self.run.data.multimodal.image_folder or os.path.dirname(os.path.abspath(prefix))
        return json_row_source(prefix, folder)

    def build_one_split(
        self, source: ImageConversationTokenSource | MockImageConversations, request: SplitRequest
    ) -> ImageChatDataset:
        """Samples of these rows' conversations."""
        if self.writer is not None:
            request = replace(request, cache=self._index_cache(source.prefix))
        train = self.run.train
        chat = ChatDataset(source, request, sequence_length=train.seq_length, seed=train.seed)
        rows = self.run.model.vision.num_image_embeddings
        return ImageChatDataset(
            chat,
            source,
            self.options,
            rows=rows,
            use=self.use,
            filler=image_slot_token_id(self.run.model, self.tokenizer),
        )

    def _index_cache(self, path: str) -> IndexCacheFolder:
        """Return where ids and packing plan are cached: --data-cache-path, else beside the data."""
        part = EnergonSplitPart.parse_data_path(path)
        beside = Path(part.folder, META, "cache") if part else Path(f"{path}.cache")
        return IndexCacheFolder.from_flag(self.run.data.data_cache_path, otherwise=beside / f"{self.name}_indices")


def image_slot_token_id(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """Return the id placed at image slots, whose embedding is not used: --image-token-index or `<image>`, else 0."""
    index = model.vision.image_token_index
    index = token_ids_by_name(tokenizer, [IMAGE]).get(IMAGE) if index is None else index
    return 0 if index is None or index >= tokenizer.vocab_size else index


def build_image_token_layout(
    model: ModelConfig, config: MultimodalDataConfig, tokenizer: Tokenizer
) -> ImageTokenLayout:
    """Return which tokens stand for an image in a sequence, as the settings say."""

    def encode_tag_text(text: str) -> tuple[int, ...]:
        return tuple(encode_without_special_tokens(tokenizer, [text])[0].tolist()) if text else ()

    tags: tuple[tuple[int, ...], ...] = ()
    if config.use_tile_tags:
        names = [f"<tile_{place}>" for place in range(1, config.max_num_tiles + 1)]
        tags = tuple(map(encode_tag_text, [*names, "<tile_global_thumbnail>"]))
    before, after = IMAGE_TAGS.get(config.image_tag_type or "", ("", ""))
    around = encode_tag_text(before), encode_tag_text(after)
    if not config.cuts_as_smolvlm:
        return ImageTokenLayout(model.vision.num_image_embeddings, tags, around)
    side = range(1, math.isqrt(config.max_num_tiles) + 1)
    places = tuple(tuple(encode_tag_text(_PLACE.format(row=row, column=column)) for column in side) for row in side)
    return ImageTokenLayout(
        model.vision.num_image_embeddings,
        (),
        around,
        places,
        (encode_tag_text(_ROW_ENDS[0]), encode_tag_text(_ROW_ENDS[1])),
    )


def make_image_chat_dataset_kind(run: RunConfig, tokenizer: Tokenizer, use: Use = "pixels") -> ImageChatDatasetKind:
    """Return the dataset kind of a vision-language model. use: what is read of images."""
    format, options = (
        run.data.chat.sft_tokenizer_prompt_format,
        ImageOptions.from_config(run.model, run.data.multimodal),
    )
    if run.data.mock_data:
        return ImageChatDatasetKind(run, tokenizer, None, options, use)
    writer = ImageConversationEncoder(
        ConversationEncoder(tokenizer, format),
        build_image_token_layout(run.model, run.data.multimodal, tokenizer),
        plain=format == "plain",
    )
    return ImageChatDatasetKind(run, tokenizer, writer, options, use)
