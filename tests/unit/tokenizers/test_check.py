"""The checks of a tokenizer: each finds what is planted, and nothing in what is sound."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import AddedToken

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer, build_tokenizer
from megatron.core.tokenizers.check import examine_tokenizer, measure_corpus_round_trips
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer

DATA = Path(__file__).resolve().parents[3] / "examples" / "data"


def byte_level(folder, added=(), special=(), normalizer=None, **config):
    """A byte-level BPE of the demo vocabulary with tokens added to it, read back."""
    merges = [tuple(line.split(" ")) for line in (DATA / "demo-merges.txt").read_text("utf-8").split("\n")[1:-1]]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=json.loads((DATA / "demo-vocab.json").read_text("utf-8")), merges=merges)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    made.add_special_tokens(["<|endoftext|>", *special])
    made.add_tokens(list(added))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **config}))
    return HuggingFaceTokenizer(folder)


@pytest.mark.parametrize(
    "config",
    [
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(DATA / "demo-vocab.json"),
            merge_file=str(DATA / "demo-merges.txt"),
        ),
        TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(DATA / "demo-llama.model")),
        TokenizerConfig(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(DATA / "demo-t5.model"), vocab_extra_ids=9
        ),
        TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(DATA / "demo-bert-vocab.txt")),
        TokenizerConfig(tokenizer_type="ByteTokenizer"),
        TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10),
    ],
)
def test_nothing_is_wrong_with_sound_tokenizers(config):
    tokenizer = build_tokenizer(config)
    assert examine_tokenizer(tokenizer, tokenizer.vocab_size).wrong == []


def test_padding_that_is_the_end_of_document_is_found(tmp_path):
    wrong = examine_tokenizer(byte_level(tmp_path, pad_token="<|endoftext|>"), None).wrong
    assert len(wrong) == 1 and wrong[0].startswith("pad and eod, eos are one id, 0 '<|endoftext|>'")
    assert examine_tokenizer(NullTokenizer(10, pad=9), None).wrong[0].startswith("pad and eod, eos are one id, 9")


def test_begin_and_end_in_one_are_noted(tmp_path):
    findings = examine_tokenizer(byte_level(tmp_path, bos_token="<|endoftext|>"), None)
    assert findings.wrong == [] and findings.notes[0].startswith("bos and eos are one id, 0")


def test_ids_beyond_the_model_are_counted_and_named():
    wrong = examine_tokenizer(ByteTokenizer(), 255).wrong
    assert wrong == [
        "2 ids are beyond the model's 255: 255 '<0xFF>', 256 '<eod>'; give the model a vocabulary of 257 or more"
    ]
    assert examine_tokenizer(ByteTokenizer(), 257).wrong == []


def test_text_that_a_byte_level_tokenizer_changes_is_wrong(tmp_path):
    # What a tokenizer that promises round trips does when it puts text in lower case.
    sound = byte_level(tmp_path)
    names = [name for name in dir(sound) if not name.startswith("__")]
    broken = SimpleNamespace(**{name: getattr(sound, name) for name in names})
    broken.tokenize = lambda text: sound.tokenize(text.lower())
    wrong = examine_tokenizer(broken, None).wrong
    assert (
        len(wrong) == 1 and "of 14 kinds of text do not come back" in wrong[0] and 'plain English ("It wasn' in wrong[0]
    )


def test_a_normalizer_that_changes_text_is_noted(tmp_path):
    findings = examine_tokenizer(byte_level(tmp_path, normalizer=tokenizers.normalizers.NFKC()), None)
    assert findings.wrong == [] and any("composed and decomposed accents" in note for note in findings.notes)


def test_added_tokens_inside_words_and_stripped_spaces_are_found(tmp_path):
    findings = examine_tokenizer(
        byte_level(
            tmp_path, added=["whale", AddedToken("sea", single_word=True)], special=[AddedToken("<mask>", lstrip=True)]
        ),
        None,
    )
    assert findings.wrong == ["added tokens are found inside words of ordinary text: 'whale'"]
    assert "added tokens swallow the white space beside them: '<mask>'" in findings.notes


def test_special_tokens_that_text_can_forge_are_found(tmp_path):
    tokenizer = byte_level(tmp_path)
    tokenizer._tokenizer.encode_special_tokens = False
    assert (
        "text that holds the name of a special token becomes that token: <|endoftext|>"
        in examine_tokenizer(tokenizer, None).wrong
    )


def test_a_corpus_is_counted_and_its_first_loss_shown():
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(DATA / "demo-bert-vocab.txt"))
    )
    result = measure_corpus_round_trips(tokenizer, [["the whale"], ["The whale", "the"]])
    assert (result.texts, result.num_bytes, result.ids, result.lost) == (3, 21, 5, 1)
    assert result.first_loss == "'The whale' became 'the whale'"
    assert result.highest == max(tokenizer.tokenize("the whale"))


def test_what_stands_around_every_text_is_no_loss():
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(DATA / "demo-llama.model"))
    )
    assert measure_corpus_round_trips(tokenizer, [["Call me Ishmael."]]).lost == 0
