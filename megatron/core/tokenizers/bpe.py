"""GPT-2's byte-level BPE, read from its two published files, without network access.

Text is split into words (with the preceding space), the UTF-8 bytes of every word are mapped to printable characters,
and the pairs of merges.txt are merged, earlier lines first. Every text has ids, and decoding them restores the text.
`<|endoftext|>` inside a text is encoded as ordinary characters, so that no document can forge a document end.
"""

from __future__ import annotations

from pathlib import Path

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.base import Tokenizer, read_flag_file_json, read_flag_file_text
from megatron.core.tokenizers.bytelevel import BPEFromMerges, ByteLevelBPE, byte_of_character, vocab_token_to_bytes

END_OF_DOCUMENT = "<|endoftext|>"


class GPT2BPETokenizer(ByteLevelBPE, Tokenizer):
    """Byte-level BPE from vocab.json and merges.txt; `<|endoftext|>` ends documents, there is no padding token."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        vocab = _validate_vocab(read_flag_file_json(vocab_file, "--vocab-file"), vocab_file)
        merges = _parse_merges(read_flag_file_text(merge_file, "--merge-file"), merge_file, vocab, vocab_file)
        self.vocab_size = max(vocab.values()) + 1
        self.eod: int = vocab[END_OF_DOCUMENT]
        self.eos = self.eod
        self.special_ids = (self.eod,)
        self._tokens = {number: token for token, number in vocab.items()}
        reached = byte_of_character().keys() | {left + right for left, right in merges}
        super().__init__(
            BPEFromMerges(_build_bpe(vocab, merges), vocab, merges, pattern="gpt2"),
            {number: vocab_token_to_bytes(token) for token, number in vocab.items()},
            {token: number for token, number in vocab.items() if token not in reached},
        )


def _build_bpe(vocab: dict[str, int], merges: list[tuple[str, str]]) -> object:
    """Return a tokenizer of the tokenizers library with this vocabulary and these merges."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    # No merge may produce the end of document, so that only `eod` does.
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return bpe


def _validate_vocab(vocab: object, path: str | Path) -> dict[str, int]:
    """Return the content of vocab.json. `ConfigError` if it is no byte-level vocabulary with an end of document."""
    if not isinstance(vocab, dict) or not vocab or not all(type(number) is int for number in vocab.values()):
        raise ConfigError(f"--vocab-file {path} is not a JSON object of tokens and their numbers")
    if len(set(vocab.values())) != len(vocab) or min(vocab.values()) < 0 or max(vocab.values()) >= 2**31:
        raise ConfigError(f"--vocab-file {path} gives one number to several tokens, or a number below 0 or beyond 2^31")
    if END_OF_DOCUMENT not in vocab:
        raise ConfigError(
            f"--vocab-file {path} has no token {END_OF_DOCUMENT}, which ends documents; add it with the "
            f"number {max(vocab.values()) + 1}"
        )
    missing = sorted(byte_of_character().keys() - vocab.keys())
    if missing:
        raise ConfigError(
            f"--vocab-file {path} is not byte-level: {len(missing)} of the 256 bytes have no token, "
            f"among them {missing[0]!r}"
        )
    return vocab


def _parse_merges(text: str, path: str | Path, vocab: dict[str, int], vocab_file: str | Path) -> list[tuple[str, str]]:
    """Return the pairs of merges.txt, in order. `ConfigError` for a line that does not fit the vocabulary."""
    merges = []
    for number, line in enumerate(text.split("\n"), 1):
        left, _, right = line.partition(" ")
        if left in vocab and right in vocab and left + right in vocab:
            merges.append((left, right))
        elif line and not line.startswith("#version"):
            raise ConfigError(
                f"--merge-file {path}, line {number}: {line!r} is not two tokens of {vocab_file} that "
                "join to a third; the two files do not belong together, or one is damaged"
            )
    return merges
