"""Kinds of networks, and what each says of itself: who needs to know asks the object, and compares no name.

The entry script chooses the kind; `ModelConfig.architecture` holds it. Files hold its name.
"""

from __future__ import annotations

from typing import ClassVar


class Architecture:
    """What a kind of network says of itself. This one: a decoder that predicts the next token."""

    name: ClassVar[str] = "gpt"
    title: ClassVar[str] = "a GPT-like model"
    layers: ClassVar[tuple[str, str]] = ("decoder.layers", "decoder.layers")  # names: without, and with cross attention
    dataset: ClassVar[str] = "gpt"  # a row of `datasets.kinds.KINDS`
    # Attention of every layer is causal, and the batches of pretraining are full of tokens.
    is_decoder_only: ClassVar[bool] = True
    attended_share: ClassVar[float] = 0.5  # of all keys, that a query sees on average
    is_encoder_decoder: ClassVar[bool] = False  # two stacks, of which the second reads the output of the first
    predicts_masked_words: ClassVar[bool] = False
    classifies_images: ClassVar[bool] = False  # it reads no text

    @property
    def pads(self) -> bool:
        """Whether batches have padding, which attention leaves out."""
        return not self.is_decoder_only

    def __eq__(self, other: object) -> bool:
        """Whether it is of the same class: configs are compared, copied and sent to other processes."""
        return type(self) is type(other)

    def __hash__(self) -> int:
        """The hash of the class."""
        return hash(type(self))

    def __repr__(self) -> str:
        """The name."""
        return repr(self.name)


class Bert(Architecture):
    """A bidirectional encoder that predicts masked words."""

    name, title, dataset = "bert", "a BERT", "bert"
    layers = ("encoder.layers", "encoder.layers")
    is_decoder_only, attended_share, predicts_masked_words = False, 1.0, True


class T5(Architecture):
    """A bidirectional encoder, whose output a decoder reads."""

    name, title, dataset = "t5", "a T5", "t5"
    layers = ("encoder.layers", "decoder.layers")
    is_decoder_only, attended_share, is_encoder_decoder = False, 1.0, True


class ImageClassifier(Architecture):
    """A vision transformer with a head for classes."""

    name, title, dataset = "vit", "an encoder of images", "vision_classify"
    layers = ("vision_model.encoder.layers", "vision_model.encoder.layers")
    is_decoder_only, attended_share, classifies_images = False, 1.0, True


GPT, VIT = Architecture(), ImageClassifier()
ARCHITECTURES = {one.name: one for one in (GPT, Bert(), T5(), VIT)}
