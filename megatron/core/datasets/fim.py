"""Fill in the middle: documents rearranged, so that a model learns to write what stands between two texts.

A document (or the part of it that a sample holds) is cut at two random characters into prefix P, middle M and suffix S,
which are tokenized anew as parts of one text, each behind a token of its own:

    PSM   <prefix> P <suffix> S <middle> M
    SPM   <prefix> <suffix> S <middle> P M

With a token that splits documents, the fragments between are rearranged instead of the whole. What is drawn for a sample
depends on the seed and the number of the sample alone: not on the process that reads it, nor on what was read before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron.core.config.flags.declare import flag_name, raise_config_error_if
from megatron.core.config.settings.data import FIMConfig
from megatron.core.datasets.continued_text import ContinuedText
from megatron.core.datasets.special_tokens import count_ids_around_text, token_ids_by_name
from megatron.core.tokenizers.base import Tokenizer

BROKEN = "\ufffd"  # what bytes that are no whole character look like
MOST_BROKEN = 3  # bytes of a character that a window can cut off, at either end


@dataclass(frozen=True, slots=True)
class FIMTokens:
    """Ids with a meaning for fill-in-the-middle. split: cuts a document into fragments, or None. pad: fills short samples."""

    prefix: int
    middle: int
    suffix: int
    eod: int
    pad: int
    split: int | None = None


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """A `Rearrange` of windows of tokens; see `GPTDataset`.

    rate: share of documents that are rearranged, and fragment_rate: of the fragments of those; spm_rate: share of
    rearranged texts whose suffix comes first. spared: text that begins so stays as it is. text: encodes and decodes the
    parts.
    """

    text: ContinuedText
    marks: FIMTokens
    seed: int
    rate: float
    spm_rate: float
    fragment_rate: float = 1.0
    spared: str | None = None

    def __call__(self, ids: np.ndarray, index: int) -> np.ndarray:
        """The ids of sample `index` with some of its documents rearranged. [t] -> [any length]"""
        random = np.random.default_rng((self.seed, index))
        return _map_ids_between_separators(ids, self.marks.eod, lambda part: self._rearrange_document(part, random))

    def _rearrange_document(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a document rearranged by probability `rate`; with `split` tokens, its fragments by `fragment_rate`."""
        if random.random() >= self.rate:
            return ids
        split = self.marks.split
        if split is None or not (ids == split).any():
            return self._rearrange_part(ids, random)
        return _map_ids_between_separators(
            ids,
            split,
            lambda part: self._rearrange_part(part, random) if random.random() < self.fragment_rate else part,
        )

    def _rearrange_part(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the ids with prefix, middle and suffix rearranged (PSM or SPM), or as they are if the text is spared."""
        begin = self.text.ids_before_text(ids)
        text = self._decode_whole_characters(ids[len(begin) :])
        if self.spared is not None and text.removeprefix(self.text.space_before).startswith(self.spared):
            return ids
        first, last = np.sort(random.integers(0, len(text) + 1, size=2)).tolist()
        texts = [text[:first], text[first:last], text[last:]]
        prefix, middle, suffix = self.text.encode(texts)
        marks = self.marks
        if random.random() < self.spm_rate:
            parts = [*begin, marks.prefix, marks.suffix, *suffix, marks.middle, *prefix, *middle]
        else:
            parts = [*begin, marks.prefix, *prefix, marks.suffix, *suffix, marks.middle, *middle]
        return np.array(parts, np.int64)

    def _decode_whole_characters(self, ids: np.ndarray) -> str:
        """The text without the pieces of a character that the edges of the window cut through."""
        text = self.text.decode(ids)
        for _ in range(MOST_BROKEN):
            if text.startswith(BROKEN):
                ids = ids[1:]
                text = self.text.decode(ids)
            if text.endswith(BROKEN):
                ids = ids[:-1]
                text = self.text.decode(ids)
        return text


def _map_ids_between_separators(ids: np.ndarray, end: int, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the ids with `change` applied to each non-empty run between two ids `end`; the `end`s stay."""
    parts: list[np.ndarray] = []
    start = 0
    for stop in [*np.flatnonzero(ids == end).tolist(), len(ids)]:
        parts += [change(ids[start:stop]) if stop > start else ids[start:stop], ids[stop : stop + 1]]
        start = stop + 1
    return np.concatenate(parts)


def build_fill_in_middle(fill: FIMConfig, tokenizer: Tokenizer, *, seed: int, pad: int) -> FillInTheMiddle:
    """Build the rearrangement that the --fim flags describe. `ConfigError` if a token is not in the vocabulary, or two
    of prefix, middle and suffix are equal. pad: used without --fim-pad-token.
    """
    flags = {
        flag_name(name): getattr(fill, name)
        for name in (
            "fim_prefix_token",
            "fim_middle_token",
            "fim_suffix_token",
            "fim_eod_token",
            "fim_pad_token",
            "fim_split_sample",
        )
    }
    ids = token_ids_by_name(tokenizer, [name for name in flags.values() if name is not None])
    raise_config_error_if(
        f"{flag} {name!r} is not one token of the vocabulary; add it to the tokenizer, or name one that is there"
        for flag, name in flags.items()
        if name is not None and name not in ids
    )
    order = [fill.fim_prefix_token, fill.fim_middle_token, fill.fim_suffix_token]
    if len({*order}) < 3:
        same = "--fim-prefix-token, --fim-middle-token and --fim-suffix-token must be three different tokens, not "
        raise_config_error_if([same + ", ".join(order)])
    prefix, middle, suffix = (ids[name] for name in order)
    marks = FIMTokens(
        prefix,
        middle,
        suffix,
        eod=ids.get(fill.fim_eod_token or "", tokenizer.eod),
        pad=ids.get(fill.fim_pad_token or "", pad),
        split=ids.get(fill.fim_split_sample or ""),
    )
    return FillInTheMiddle(
        ContinuedText.of(tokenizer, count_ids_around_text(tokenizer)),
        marks,
        seed,
        rate=fill.fim_rate,
        spm_rate=fill.fim_spm_rate,
        fragment_rate=1.0 if fill.fim_fragment_rate is None else fill.fim_fragment_rate,
        spared=fill.fim_no_prefix,
    )
