"""Prompts with images: conversations written as in training, with a slot for each row of an image.

[{"role": "user", "content": "<image>\\nWhat is it?"}], [bytes of a file]  ->  ids, PromptImages
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.core.config.flags import from_values
from megatron.core.config.settings.data import ChatConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.multimodal import MultimodalConfig
from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.image_conversations import SLOT, ConversationWriter
from megatron.core.datasets.images import ImageError, ImageOptions, decode, empty_image_batch, read_grid, tile_image
from megatron.core.datasets.multimodal import image_filler_id, image_token_writer
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.step_input import PromptImages

KEPT_FILES = 32  # files whose tiles stay


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Writes prompts for one network. plain: the user says nothing but images."""

    writer: ConversationWriter
    options: ImageOptions
    rows: int
    filler: int
    cache: OrderedDict[bytes, np.ndarray] = field(
        default_factory=OrderedDict
    )  # tiles of the files that came last, by their hash

    @staticmethod
    def from_model(
        model: ModelConfig, tokenizer: Tokenizer, settings: Mapping[str, Any], format: str | None = None
    ) -> ImagePrompts:
        """As the network was trained. settings: of its checkpoint. format: how conversations are written, if another."""
        data, chat = from_values(MultimodalConfig, settings), from_values(ChatConfig, settings)
        encoder = ConversationEncoder(tokenizer, format or chat.sft_tokenizer_prompt_format)
        writer = ConversationWriter(
            encoder, image_token_writer(model, data, tokenizer), plain=chat.sft_tokenizer_prompt_format == "plain"
        )
        return ImagePrompts(
            writer,
            ImageOptions.from_config(model, data),
            model.vision.num_image_embeddings,
            image_filler_id(model, tokenizer),
        )

    def write(
        self, messages: Sequence[Mapping[str, Any]], files: Sequence[bytes]
    ) -> tuple[tuple[int, ...], PromptImages]:
        """The ids of a prompt that ends where an answer begins, and its images.

        messages: with <image> in what the user says, as often as there are files. Raises `DataError` for what is no conversation,
        and `ImageError` for a file that cannot be used.
        """
        parts = [self._tiles(file) for file in files]
        ids = self.writer.encode_prompt(messages, [read_grid(file, self.options) for file in files])
        images = np.concatenate([empty_image_batch(self.options), *parts])
        is_slot = ids == SLOT
        slots = np.where(is_slot, np.cumsum(is_slot) - 1, -1)
        digest = hashlib.blake2b(images.tobytes(), digest_size=16).digest()
        return tuple(np.where(is_slot, self.filler, ids).tolist()), PromptImages(images, tuple(slots.tolist()), digest)

    def _tiles(self, file: bytes) -> np.ndarray:
        """The tiles of a file, which stay for conversations that show it again. float32 [n, channels, height, width]"""
        if len(file) > self.options.max_bytes:
            raise ImageError(f"it has more than {self.options.max_bytes} bytes")
        key = hashlib.blake2b(file, digest_size=16).digest()
        cached = self.cache.pop(key, None)
        result = tile_image(decode(file, self.options), self.options) if cached is None else cached
        self.cache[key] = result
        while len(self.cache) > KEPT_FILES:
            self.cache.popitem(last=False)
        return result
