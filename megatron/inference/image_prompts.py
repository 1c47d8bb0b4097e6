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

from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.settings.data import SFTDataConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.multimodal import MultimodalDataConfig
from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.image_conversations import SLOT, ImageConversationEncoder
from megatron.core.datasets.images import (
    ImageError,
    ImageOptions,
    decode_image,
    empty_image_batch,
    tile_grid_of_image_bytes,
    tile_image,
)
from megatron.core.datasets.multimodal import build_image_token_layout, image_slot_token_id
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.step_input import PromptImages

KEPT_FILES = 32  # files whose tiles stay


@dataclass(frozen=True, slots=True)
class ImagePromptWriter:
    """Encodes prompts with images for one network. filler: id at image slots. cache: latest files' tiles, by hash."""

    writer: ImageConversationEncoder
    options: ImageOptions
    filler: int
    cache: OrderedDict[bytes, np.ndarray] = field(default_factory=OrderedDict)

    @staticmethod
    def from_model(
        model: ModelConfig, tokenizer: Tokenizer, settings: Mapping[str, Any], format: str | None = None
    ) -> ImagePromptWriter:
        """Return a writer as in the training that `settings` describe. format: of conversations, if another."""
        data, chat = (
            config_from_flat_dict(MultimodalDataConfig, settings),
            config_from_flat_dict(SFTDataConfig, settings),
        )
        encoder = ConversationEncoder(tokenizer, format or chat.sft_tokenizer_prompt_format)
        writer = ImageConversationEncoder(
            encoder, build_image_token_layout(model, data, tokenizer), plain=chat.sft_tokenizer_prompt_format == "plain"
        )
        return ImagePromptWriter(writer, ImageOptions.from_config(model, data), image_slot_token_id(model, tokenizer))

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], files: Sequence[bytes]
    ) -> tuple[tuple[int, ...], PromptImages]:
        """Return the ids of a prompt, up to where the answer begins, and its images.
        messages: user messages contain <image> as often as there are files. Raises `DataError` for what is no
        conversation, and `ImageError` for a file that cannot be used.
        """
        parts = [self._cached_image_tiles(file) for file in files]
        ids = self.writer.encode_prompt_ids(messages, [tile_grid_of_image_bytes(file, self.options) for file in files])
        images = np.concatenate([empty_image_batch(self.options), *parts])
        is_slot = ids == SLOT
        slots = np.where(is_slot, np.cumsum(is_slot) - 1, -1)
        digest = hashlib.blake2b(images.tobytes(), digest_size=16).digest()
        return tuple(np.where(is_slot, self.filler, ids).tolist()), PromptImages(images, tuple(slots.tolist()), digest)

    def _cached_image_tiles(self, file: bytes) -> np.ndarray:
        """Return the tiles of a file, cached by its hash, float32 [n, channels, height, width]. Raises `ImageError`."""
        if len(file) > self.options.max_bytes:
            raise ImageError(f"it has more than {self.options.max_bytes} bytes")
        key = hashlib.blake2b(file, digest_size=16).digest()
        cached = self.cache.pop(key, None)
        result = tile_image(decode_image(file, self.options), self.options) if cached is None else cached
        self.cache[key] = result
        while len(self.cache) > KEPT_FILES:
            self.cache.popitem(last=False)
        return result
