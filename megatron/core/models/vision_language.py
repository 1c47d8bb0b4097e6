"""A decoder that reads images: at their positions stand rows of the projected states of an encoder (`vision.py`)."""

from __future__ import annotations

from torch import Tensor

from megatron.core.models.embedding import IdsWithImages
from megatron.core.models.gpt import GPTModel
from megatron.core.models.vision import ImageEmbedder


class VisionLanguageModel(GPTModel):
    """One pipeline stage of a decoder that reads text and images. `forward` takes ids as `IdsWithImages` or plain."""

    def _add_embedding(self, *, has_mtp: bool) -> None:
        super()._add_embedding(has_mtp=has_mtp)
        self.image_input = ImageEmbedder(self.build) if self.stage.has_embedding else None

    def _embed(self, ids: Tensor | IdsWithImages, positions: Tensor | None) -> Tensor:
        """Return the hidden states [s or s/tp, b, h] of ids [b, s], with image features at the positions of images."""
        if not isinstance(ids, IdsWithImages):
            return super()._embed(ids, positions)
        assert self.image_input is not None, "the first stage reads images"
        return self.image_input(super()._embed(ids.ids, positions), ids.images, ids.slots)
