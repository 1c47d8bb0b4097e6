"""What a tokenizer puts into text and around it: tokens that have a name, and ids before and after every text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.base import Tokenizer, tokenize_around_special

IMAGE = "<image>"  # what stands for an image in a text


def token_ids_by_name(tokenizer: Tokenizer, names: Iterable[str]) -> dict[str, int]:
    """Return the id of each of these names that is one token of the vocabulary; other names are left out."""
    requested = set(names)
    result: dict[str, int] = {}
    for token in range(tokenizer.vocab_size if requested else 0):
        try:
            name = tokenizer.id_to_token(token)
        except (LookupError, ValueError):  # a number without a token
            continue
        if name in requested:
            result.setdefault(name, token)
    return result


def count_ids_around_text(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return how many ids (BOS, EOS) `tokenize` puts (before, after) every text. `ConfigError` if that is unclear."""
    # A text that every tokenizer reads: where texts are ids, 0 is in every vocabulary.
    empty, letter = tokenizer.tokenize(""), tokenizer.tokenize("0")
    for before in range(len(empty) + 1):
        after = len(empty) - before
        if (
            len(letter) > len(empty)
            and letter[:before] == empty[:before]
            and letter[len(letter) - after :] == empty[before:]
        ):
            return before, after
    raise ConfigError(
        f"the tokenizer gives {empty} to no text and {letter} to '1', so that it cannot tokenize a text in "
        "pieces, as --fim-data, --sft and the tasks do; choose another"
    )


def tokenize_marked_text(tokenizer: Tokenizer, text: str, *, ends: bool = False) -> list[int]:
    """Return the ids of a text as transformers' tokenizers give them: names of special tokens are tokens, and what the
    tokenizer puts before every text stands before it. ends: the end of document stands behind it, once; what the tokenizer
    puts there is left out. `ValueError` for text that cannot be encoded.
    """
    before, after = count_ids_around_text(tokenizer)

    def without_frame(part: str) -> list[int]:
        ids = list(tokenizer.tokenize(part))
        return ids[before : len(ids) - after]

    if tokenizer.tokenize_with_special("1") == without_frame("1"):
        inner = list(tokenizer.tokenize_with_special(text))
    else:  # a kind that frames each part
        inner = tokenize_around_special(text, tokenizer.special, without_frame)
    end = [tokenizer.eod] if ends and inner[-1:] != [tokenizer.eod] else []
    return [*tokenizer.tokenize("")[:before], *inner, *end]


def encode_without_special_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], frame: tuple[int, int] | None = None
) -> list[np.ndarray]:
    """The ids of each text, [t] each, without those that the tokenizer puts around it. frame: their numbers, if known."""
    before, after = frame or count_ids_around_text(tokenizer)
    ids, lengths = tokenizer.encode_texts_flat(texts)
    return [part[before : len(part) - after] for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(texts) else []


def refuse_added_special_tokens(tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` for a tokenizer that puts ids around every text: each sentence of a sample would get them."""
    if not any(count_ids_around_text(tokenizer)):
        return
    way_out = {
        "HuggingFaceTokenizer": "give --tokenizer-hf-no-include-special-tokens",
        "SentencePieceTokenizer": "choose --tokenizer-type GPTSentencePieceTokenizer instead of Llama2Tokenizer",
    }
    formatted = " ".join(map(tokenizer.id_to_token, tokenizer.tokenize("1")))
    raise ConfigError(
        f"the tokenizer makes '{formatted}' of '1', and would put the same around each sentence of a sample; "
        f"{way_out.get(type(tokenizer).__name__, 'choose another tokenizer')}, when sentences are written and in training"
    )
