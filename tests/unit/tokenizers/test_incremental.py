"""The text of ids one by one, for every kind of tokenizer: joined it is the text of all ids, and nothing waits needlessly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.incremental import IncrementalDecoder
from tests.helpers.tokenizer_kinds import EMOJI, KINDS, TEXTS, built, id_sequences, tokenizer_of


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(request.param, tmp_path_factory.getbasetemp())


def compare_pieces_with_the_whole(tokenizer: Tokenizer, count: int) -> None:
    for ids in id_sequences(tokenizer, count):
        decoder = IncrementalDecoder(tokenizer)
        pieces = [decoder.add(token) for token in ids]
        assert "".join(pieces) + decoder.finish() == tokenizer.detokenize(ids), ids
        place = len(ids) // 2
        before, after = IncrementalDecoder(tokenizer), IncrementalDecoder(tokenizer, ids[:place])
        told = "".join(before.add(token) for token in ids[:place])
        if not tokenizer.cleans_up_spaces:  # a space that precedes may go with what follows
            told += "".join(after.add(token) for token in ids[place:]) + after.finish()
            assert told == tokenizer.detokenize(ids), (ids[:place], ids[place:])


def test_pieces_join_to_the_text_of_all_ids(tokenizer: Tokenizer) -> None:
    compare_pieces_with_the_whole(tokenizer, 25)


@pytest.mark.nightly
def test_pieces_join_to_the_text_of_all_ids_for_thousands_of_texts(tokenizer: Tokenizer) -> None:
    compare_pieces_with_the_whole(tokenizer, 5000)


def test_whole_characters_are_told_at_once(tokenizer: Tokenizer) -> None:
    if tokenizer.cleans_up_spaces or type(tokenizer).__name__ == "NullTokenizer":
        return
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        decoder = IncrementalDecoder(tokenizer)
        told, whole = "", tokenizer.detokenize(ids)
        for place, token in enumerate(ids, start=1):
            told += decoder.add(token)
            assert len(decoder._held) <= 3
            so_far = tokenizer.detokenize(ids[:place])
            assert told == (so_far if whole.startswith(so_far) else so_far.rstrip("\ufffd")), (text, place)
        assert told == whole and decoder.finish() == "" and not decoder.is_incomplete


@pytest.mark.parametrize("kind", ["byte level", "llama", "gemma", "ByteTokenizer", "GPTSentencePieceTokenizer"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_preceding_text_began_belongs_to_the_text(
    kind: str, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = tokenizer_of(kind, tmp_path_factory.getbasetemp())
    ids = tokenizer.tokenize("so " + EMOJI)
    decoder = IncrementalDecoder(tokenizer, ids[: len(ids) - 4 + cut])
    assert decoder.is_incomplete
    assert "".join(decoder.add(token) for token in ids[len(ids) - 4 + cut :]) == EMOJI
    decoder = IncrementalDecoder(tokenizer, ids[: len(ids) - 4 + cut])
    assert decoder.finish() == "\ufffd" * (cut if tokenizer.replaces_each_byte else 1)


def test_a_byte_that_ends_no_character_does_not_undo_the_characters_before(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llama", tmp_path)
    token = {name: number for number, name in tokenizer._tokens.items()}  # type: ignore[union-attr, attr-defined]
    emoji = [token[f"<0x{byte:02X}>"] for byte in EMOJI.encode()]
    assert tokenizer.detokenize([*emoji, emoji[0], token["a"]]) == EMOJI + "\ufffda"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
    ids=str,
)
def test_decoders_that_take_back_what_they_wrote_are_refused(tmp_path: Path, decoder: Any) -> None:
    built(decoder).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="is not built here; ByteLevel"):
        HuggingFaceTokenizer(tmp_path)
