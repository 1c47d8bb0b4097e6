"""Training of new vocabularies from text: a byte-level BPE, or a SentencePiece model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from megatron.core.config.flags.declare import ConfigError

LONGEST_LINE = 100_000  # characters; the trainer of SentencePiece leaves longer lines out
SENTENCEPIECE_NAMES = ("<unk>", "<s>", "</s>", "<pad>")
_KEEP_WHITESPACE: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}


def train_byte_level_bpe(
    texts: Iterable[Sequence[str]], *, vocab_size: int, special_tokens: Sequence[str], min_frequency: int
) -> dict[str, str]:
    """Train a BPE of GPT-2's kind. Returns the content of vocab.json, merges.txt, tokenizer.json and
    tokenizer_config.json.

    texts: batches of texts, read once. special_tokens get the first ids; the first of them ends documents. vocab_size:
    number of ids, including special tokens and the 256 bytes; fewer if the text has fewer pairs that occur
    `min_frequency` times.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    clash = sorted(set(special_tokens) & set(alphabet))
    if len(set(special_tokens)) != len(special_tokens) or not special_tokens or not all(special_tokens) or clash:
        raise ConfigError(
            f"--special-tokens {' '.join(special_tokens)}: give at least one name, each once, longer than a letter"
        )
    if vocab_size < len(alphabet) + len(special_tokens):
        raise ConfigError(
            f"--vocab-size {vocab_size} has no room for the 256 bytes and {len(special_tokens)} special tokens; give "
            f"{len(alphabet) + len(special_tokens)} or more"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=list(special_tokens),
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        ),
    )
    whole = json.loads(bpe.to_str())
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"])
    return {
        "vocab.json": json.dumps(whole["model"]["vocab"], ensure_ascii=False),
        "merges.txt": "".join(f"{line}\n" for line in ("#version: 0.2", *merges)),
        "tokenizer.json": json.dumps(whole, ensure_ascii=False, indent=1),
        "tokenizer_config.json": json.dumps({"eos_token": special_tokens[0]}),
    }


def train_sentencepiece(
    texts: Iterable[Sequence[str]],
    *,
    kind: Literal["bpe", "unigram"],
    vocab_size: int,
    special_tokens: Sequence[str],
    keep_whitespace: bool,
    max_lines: int,
    threads: int,
) -> bytes:
    """Train a SentencePiece model with byte fallback for unknown characters. Returns the content of its .model file.

    The first ids are <unk>, <s>, </s>, <pad> and the special tokens. keep_whitespace: decoding restores the text,
    instead of NFKC normalization and single spaces. max_lines: train on a random sample of this many lines; 0: on all.
    """
    import sentencepiece

    clash = sorted(set(special_tokens) & set(SENTENCEPIECE_NAMES))
    if clash or len(set(special_tokens)) != len(special_tokens) or not all(special_tokens):
        raise ConfigError(
            f"--special-tokens {' '.join(special_tokens)}: give each name once, and none of "
            f"{' '.join(SENTENCEPIECE_NAMES)}, which the model has anyway"
        )
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(1)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_yield_bounded_lines(texts),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            control_symbols=list(special_tokens),
            pad_id=3,
            byte_fallback=True,
            max_sentence_length=4 * LONGEST_LINE,
            input_sentence_size=max_lines,
            shuffle_input_sentence=max_lines > 0,
            num_threads=threads,
            minloglevel=2,
            **(_KEEP_WHITESPACE if keep_whitespace else {}),
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise ConfigError(f"--vocab-size {vocab_size}: no model can be learnt from this text: {error}") from error
    return model.getvalue()


def _yield_bounded_lines(texts: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of all texts, cut to LONGEST_LINE characters, with NUL as a space."""
    for batch in texts:
        for text in batch:
            for line in text.split("\n"):
                line = line.replace("\0", " ")
                for first in range(0, len(line), LONGEST_LINE):
                    yield line[first : first + LONGEST_LINE]
