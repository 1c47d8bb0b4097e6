"""Engines: libraries that encode text with a byte-level BPE, and the choice of the fastest that is verified.

    reference  the library that defines the ids: tokenizers for merges, tiktoken for ranks
    choose_tokenizer_engine  gigatoken, else tiktoken, else the reference: the first that gives the reference's ids for the whole sample of
               difficult text (difficult_texts.py), and a sentence with the reason

An engine is a function from texts to flat ids. Names of special tokens are ordinary text for every engine.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron.core.tokenizers.base import flatten_ids
from megatron.core.tokenizers.difficult_texts import DIFFICULT

Engine = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]

# How text is cut into words, before the pairs of each word are joined. gpt2 is written as tiktoken does it: the same
# words as the published expression, found faster. v1 and v2 are Megatron's names.
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Patterns of published vocabularies, which stand in `MergeRanks` as expressions: so does one that a tokenizer.json holds, and the
# two are one tokenizer.
PUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# gigatoken has words cut by hand for some patterns, under names of its own.
GIGATOKEN_NAMES: Mapping[str, str] = MappingProxyType(
    {"gpt2": "gpt2", "v2": "nemotron", PUBLISHED["cl100k"]: "cl100k", PUBLISHED["o200k"]: "o200k"}
)


@dataclass(frozen=True, slots=True)
class MergeRanks:
    """A byte-level BPE by ranks: of all adjacent pairs in a word whose concatenation is a token, the one of lowest rank
    merges first.

    tokens: the 256 single bytes in the order of their value, then longer tokens by rank. ids: the id of each. pattern:
    a key of PATTERNS, or a regular expression.
    """

    tokens: tuple[bytes, ...]
    ids: tuple[int, ...]
    pattern: str


@contextmanager
def rust_panics_as_errors() -> Iterator[None]:
    """Context manager that turns a panic of a Rust library into a `ValueError`; pyo3's exception is not an `Exception`.

    tiktoken panics if its regular expressions run out of stack, as in a million blanks.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer's library gave up: {error}") from None


def num_usable_processors() -> int:
    """Return the number of processors this process may use; 1 in a worker process, whose siblings use the others."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tiktoken_engine(ranks: MergeRanks) -> Engine:
    """Return a tiktoken engine that encodes one text in each thread."""
    import tiktoken

    table = np.asarray(ranks.ids, np.int32)
    encoding = tiktoken.Encoding(
        "ranks",
        pat_str=PATTERNS.get(ranks.pattern, ranks.pattern),
        special_tokens={},
        mergeable_ranks={token: rank for rank, token in enumerate(ranks.tokens)},
    )

    def encode(text: str) -> list[int]:
        # Without special tokens, encode_ordinary is the way that does not look for them; it hides lone surrogates.
        text.encode()
        with rust_panics_as_errors():
            return encoding.encode_ordinary(text)

    def encode_texts_flat(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if len(texts) == 1:
            result = [encode(texts[0])]
        else:
            with ThreadPoolExecutor(num_usable_processors()) as pool:
                result = list(pool.map(encode, texts))
        ranks_of_texts, lengths = flatten_ids(result)
        return table[ranks_of_texts], lengths

    return encode_texts_flat


def gigatoken_engine_from_ranks(ranks: MergeRanks) -> Engine:
    """Return a gigatoken engine built from ranks. Raises `ValueError` if it does not know their splitting pattern."""
    import gigatoken

    name = GIGATOKEN_NAMES.get(ranks.pattern)
    if name is None:
        raise ValueError("it does not know the pattern that cuts text into words")
    with tempfile.TemporaryDirectory() as folder:  # it reads ranks from a file only
        path = os.path.join(folder, "ranks.tiktoken")
        with open(path, "wb") as file:
            file.writelines(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks.tokens))
        return _gigatoken_engine(gigatoken.Tokenizer.from_tiktoken(path, name, {}), np.asarray(ranks.ids, np.int32))


def gigatoken_engine_from_json(tokenizer_json: str) -> Engine:
    """Return a gigatoken engine built from the content of a tokenizer.json, without its special tokens."""
    import gigatoken

    parsed = json.loads(tokenizer_json)
    parsed.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return _gigatoken_engine(gigatoken.Tokenizer.from_json(json.dumps(parsed)), None)


def _gigatoken_engine(encoder: Any, table: np.ndarray | None) -> Engine:
    """Return an engine that encodes all texts at once on all processors; on one inside a worker process."""

    def encode_texts_flat(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        with rust_panics_as_errors():
            result = encoder.encode_batch([text.encode() for text in texts])
        if isinstance(result, list):
            raise ImportError("it hands over lists", name="awkward")
        layout = result.layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return ids if table is None else table[ids], np.diff(offsets)

    return encode_texts_flat


def tokenizers_engine(tokenizer: Any, add_special_tokens: bool = False) -> Engine:
    """Return an engine of the tokenizers library, for any kind of model."""

    def encode_texts_flat(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        for text in texts:
            text.encode()
        with rust_panics_as_errors():
            if len(texts) == 1:  # starts no threads, so that a process may fork after it
                encodings = [tokenizer.encode(texts[0], add_special_tokens=add_special_tokens)]
            else:
                encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return flatten_ids([encoding.ids for encoding in encodings])

    return encode_texts_flat


def choose_tokenizer_engine(
    candidates: Mapping[str, Callable[[], Engine]], reference: Engine, reference_name: str
) -> tuple[Engine, str]:
    """Return the first candidate engine that gives the reference's ids for the difficult sample, else the reference;
    and a sentence on the choice.

    candidates: package -> constructor of its engine, the fastest first.
    """
    refusals: list[str] = []
    for name, build in candidates.items():
        try:
            engine = build()
            problem = engine_difference(engine, reference)
        except ImportError as error:
            problem = (
                "is not installed"
                if error.name in (None, name)
                else f"lacks the package {error.name}, which it needs: pip install {error.name}"
            )
        except Exception as error:  # whatever an optional library raises, another does its work
            problem = f"cannot be used: {error}"
        if problem is None:
            return engine, _engine_choice_text(
                name, f"its ids equal those of {reference_name} on {len(DIFFICULT)} kinds of difficult text", refusals
            )
        refusals.append(f"{name} {problem}")
    return reference, _engine_choice_text(reference_name, "it defines the ids", refusals)


def engine_difference(engine: Engine, reference: Engine) -> str | None:
    """Return how an engine's ids differ from the reference on the sample of difficult text; None if they do not."""
    ours, theirs = engine(list(DIFFICULT.values())), reference(list(DIFFICULT.values()))
    if np.array_equal(ours[1], theirs[1]) and np.array_equal(ours[0], theirs[0]):
        return None
    for kind, text in DIFFICULT.items():
        if not np.array_equal(engine([text])[0], reference([text])[0]):
            return f"gives other ids for {kind}"
    return "gives other ids for several texts at once"


def _engine_choice_text(name: str, reason: str, refusals: Sequence[str]) -> str:
    """Return a sentence on the chosen engine, the reason, and why others were refused."""
    return "; ".join([f"text is encoded by {name} {metadata.version(name)}: {reason}", *refusals])
