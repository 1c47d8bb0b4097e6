"""Text with spans taken out, and the spans, for an encoder-decoder (Raffel et al., 2019).

    text      a b c d e f g             spans c d and f are taken out; <k> is the k-th sentinel
    text_enc  a b <0> e <1> g           what the encoder reads
    text_dec  BOS <0> c d <1> f         what the decoder reads
    labels    <0> c d <1> f EOS         what it is to say

Sample k is drawn from a generator of its own, RandomState(seed + k). Spans are one to ten words. A span for which there is
no sentinel or no room in the decoder stays in the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.dataset_protocols import Sample, SplitRequest, TokenSpan
from megatron.core.datasets.gpt import TokenSource, check_ids_in_vocab
from megatron.core.datasets.masking import TokenMaskingOptions, group_positions_by_word, mask_tokens
from megatron.core.datasets.sentence_map import SentenceMap, SentenceMapOptions


@dataclass(frozen=True, slots=True)
class T5SampleOptions:
    """How sentences become one T5 sample. sentinels: their ids, in the order of their numbers.

    continues: bool [v], whether an id continues a word (its length is the vocabulary size).
    """

    encoder_length: int
    decoder_length: int
    short_seq_prob: float
    masking: TokenMaskingOptions
    continues: np.ndarray
    sentinels: tuple[int, ...]
    bos: int
    eos: int
    pad: int


class T5Dataset(SentenceMap):
    """One split of one token source, as shuffled samples.

    request: its part is a range of documents. A sample holds text_enc, enc_mask
    (int64 [encoder length]), text_dec, labels, loss_mask, dec_mask (int64 [decoder length]; masks are 1 where there is a
    token) and truncated (int64 scalar).
    """

    def __init__(self, source: TokenSource, options: T5SampleOptions, request: SplitRequest, *, seed: int) -> None:
        # Two places are left free, as Megatron does.
        rows = SentenceMapOptions(options.encoder_length - 2, options.short_seq_prob, 1, seed)
        super().__init__(source, rows, request)
        self.options, self.seed = options, seed
        self.description |= {"mask_prob": options.masking.probability, "decoder_length": options.decoder_length}

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample."""
        options, (first, last, target) = self.options, self.row(index)
        random = np.random.RandomState((self.seed + index) % 2**32)
        whole = self.token_ids(first, last)
        ids = whole[:target]
        check_ids_in_vocab(np.asarray(ids, np.int64), len(options.continues), self.prefix)
        hidden = mask_tokens(
            ids,
            group_positions_by_word(ids, options.continues, ()),
            options.masking,
            target_length=target,
            replace=lambda token: token,
            random=random,
        )
        encoder, decoder, at = [], [], 0
        for sentinel, span in zip(options.sentinels, self._fitting_spans(hidden.spans)):
            encoder += [*ids[at : span[0]], sentinel]
            decoder += [sentinel, *(ids[position] for position in span)]
            at = span[-1] + 1
        encoder += ids[at:]
        # A text without tokens is read as one of padding: a decoder must have something to look at.
        text_enc, enc_mask = _pad_with_mask(encoder or [options.pad], options.encoder_length, options.pad)
        text_dec, dec_mask = _pad_with_mask([options.bos, *decoder], options.decoder_length, options.pad)
        labels, loss_mask = _pad_with_mask([*decoder, options.eos], options.decoder_length, 0)
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": loss_mask,
            "enc_mask": enc_mask,
            "dec_mask": dec_mask,
            "truncated": np.array(len(whole) > target, np.int64),
        }

    def token_sources(self, index: int) -> list[TokenSpan]:
        """Where the tokens of the index-th sample came from; positions are those of the text before spans are taken out."""
        first, last, target = self.row(index)
        return self.token_spans(first, last, 0, target, 0)

    def _fitting_spans(self, spans: list[list[int]]) -> list[list[int]]:
        """Return the spans, in order of position, that get a sentinel and fit in the decoder; earlier ones first."""
        room = self.options.decoder_length - 1
        result: list[list[int]] = []
        for span in spans:
            if len(span) + 1 <= room and len(result) < len(self.options.sentinels):
                room -= len(span) + 1
                result.append(span)
        return sorted(result)


def _pad_with_mask(ids: list[int], size: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids padded to `size`, and a mask that is 1 where there is an id. int64 [size] each"""
    padded, used = np.full(size, pad, np.int64), np.zeros(size, np.int64)
    padded[: len(ids)], used[: len(ids)] = ids, 1
    return padded, used
