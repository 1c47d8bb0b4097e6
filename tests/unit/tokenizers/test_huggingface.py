"""HuggingFaceTokenizer against transformers, for tokenizers of several makes."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.difficult_texts import DIFFICULT
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "examples" / "data"
BERT = ROOT.parent / "shared" / "data" / "tokenizers" / "bert-uncased"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [*DIFFICULT.values(), "Call me Ishmael. Some years ago", "<s> </s> one <|endoftext|> two", "z" * 50_000]


def byte_level(*, expression=None, template=False, normalizer=None, added=()):
    """A byte-level tokenizer with a begin of text, of the demo vocabulary."""
    merges = [tuple(line.split(" ")) for line in (DATA / "demo-merges.txt").read_text("utf-8").split("\n")[1:-1]]
    made = Tokenizer(models.BPE(vocab=json.loads((DATA / "demo-vocab.json").read_text("utf-8")), merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if expression:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(expression), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    made.add_special_tokens(["<s>", "</s>", "<|endoftext|>"])
    made.add_tokens(list(added))
    if template:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A $B",
            special_tokens=[(name, made.token_to_id(name)) for name in ("<s>", "</s>")],
        )
    return made


def saved(made, folder, **config):
    """A folder as `save_pretrained` leaves it."""
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def compare(tokenizer, path, **settings):
    """Same ids as transformers for every text, one by one and all at once."""
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), split_special_tokens=True)
    theirs.backend_tokenizer.no_truncation()
    theirs.backend_tokenizer.no_padding()
    expected = [theirs(text, **settings).input_ids for text in TEXTS]
    assert [tokenizer.tokenize(text) for text in TEXTS] == expected
    ids, lengths = tokenizer.encode_texts_flat(TEXTS)
    assert ids.tolist() == [token for ids in expected for token in ids] and lengths.tolist() == list(map(len, expected))
    assert [len(tokenizer.token_byte_spans(text)) for text in TEXTS] == list(map(len, expected))
    for ids in expected:
        assert tokenizer.detokenize(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    "name, made",
    [
        ("plain", byte_level()),
        ("qwen", byte_level(expression=QWEN)),
        ("unknown expression", byte_level(expression=r"\s?\w+|\W")),
        ("template", byte_level(template=True)),
        ("normalized", byte_level(normalizer=normalizers.NFC())),
        ("added", byte_level(added=["Ishmael", AddedToken("years", lstrip=True, rstrip=True)])),
    ],
)
def test_ids_are_those_of_transformers(tmp_path, name, made):
    folder = saved(made, tmp_path / "tokenizer")
    compare(HuggingFaceTokenizer(folder), folder)


def test_ids_of_the_published_bert_are_those_of_transformers():
    if not BERT.exists():
        pytest.skip("the published tokenizer is not here")
    tokenizer = HuggingFaceTokenizer(BERT)
    compare(tokenizer, BERT)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.pad, tokenizer.mask, tokenizer.eod) == (101, 102, 0, 103, 102)
    compare(HuggingFaceTokenizer(BERT, include_special=False), BERT, add_special_tokens=False)


def test_plain_byte_level_text_takes_the_fast_engine_and_others_the_packages_own(tmp_path):
    pytest.importorskip("gigatoken")
    sentences = [
        HuggingFaceTokenizer(saved(made, tmp_path / str(place))).engine
        for place, made in enumerate(
            [
                byte_level(),
                byte_level(expression=QWEN),
                byte_level(template=True),
                byte_level(expression=r"\s?\w+|\W"),
                byte_level(normalizer=normalizers.NFC()),
                byte_level(added=["Ishmael"]),
            ]
        )
    ]
    chosen = [sentence.removeprefix("text is encoded by ").split(":")[0].split(" ")[0] for sentence in sentences]
    assert chosen == ["gigatoken", "gigatoken", "gigatoken", "tiktoken", "tokenizers", "tokenizers"]


def test_special_tokens_in_text_are_text_unless_a_programme_wrote_it(tmp_path):
    folder = saved(byte_level(template=True), tmp_path / "tokenizer")
    tokenizer = HuggingFaceTokenizer(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    text = "one<|endoftext|></s> two"
    assert tokenizer.tokenize_with_special(text) == theirs(text, add_special_tokens=False).input_ids
    assert not {tokenizer.bos, 0} & set(tokenizer.tokenize(text)[1:-1])
    assert (
        tokenizer.tokenize("")[0] == tokenizer.bos
        and HuggingFaceTokenizer(folder, include_special=False).tokenize("") == []
    )


def test_the_settings_beside_it_name_the_special_tokens_and_the_template(tmp_path):
    folder = saved(
        byte_level(),
        tmp_path / "tokenizer",
        bos_token={"content": "<s>"},
        eos_token="<|endoftext|>",
        pad_token=None,
        chat_template="{{ messages }}",
        additional_special_tokens=["</s>"],
    )
    tokenizer = HuggingFaceTokenizer(folder)
    end = tokenizer.tokenize_with_special("</s>")
    assert (tokenizer.eod, tokenizer.eos, tokenizer.pad) == (0, 0, None) and tokenizer.chat_template == "{{ messages }}"
    assert list(tokenizer.additional_special_tokens_ids) == end and set(tokenizer.special_ids) == {
        0,
        tokenizer.bos,
        *end,
    }
    (folder / "chat_template.jinja").write_text("{% if x %}{% endif %}", encoding="utf-8")
    assert HuggingFaceTokenizer(folder / "tokenizer.json").chat_template == "{% if x %}{% endif %}"


def test_of_several_templates_the_default_is_taken(tmp_path):
    rows = [{"name": "tools", "template": "{{ 1 }}"}, {"name": "default", "template": "{{ 2 }}"}]
    folder = saved(byte_level(), tmp_path / "tokenizer", eos_token="</s>", chat_template=rows)
    assert HuggingFaceTokenizer(folder).chat_template == "{{ 2 }}"


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=8)
    tokenizer = HuggingFaceTokenizer(saved(made, tmp_path / "tokenizer"))
    assert len(tokenizer.tokenize("a b c d e f g h i j k l")) > 8 and len(tokenizer.tokenize("a")) == 1


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(eos_token="<end>"), "names '<end>' as eos_token, but tokenizer.json has no such token"),
        (dict(eos_token=7), "names 7 as eos_token"),
        (dict(bos_token="<s>"), "no end of document is known"),
    ],
)
def test_names_that_the_vocabulary_lacks_are_named(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        HuggingFaceTokenizer(saved(byte_level(), tmp_path / "tokenizer", **config))


def test_a_file_cut_anywhere_is_named(tmp_path):
    folder, rng = saved(byte_level(), tmp_path / "tokenizer"), random.Random(0)
    content = (folder / "tokenizer.json").read_bytes()
    for wrong in [b"", b"[]", b"{}", b"null", b"\xff", *(content[: rng.randrange(len(content))] for _ in range(8))]:
        (folder / "tokenizer.json").write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"--tokenizer-model .*tokenizer\.json is not"):
            HuggingFaceTokenizer(folder)


def test_settings_that_are_not_json_are_named(tmp_path):
    folder = saved(byte_level(), tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="tokenizer_config.json is not a JSON object"):
        HuggingFaceTokenizer(folder)


def test_a_name_of_the_hub_is_a_missing_file(monkeypatch):
    monkeypatch.setattr("socket.socket", None)  # whoever asked the network would fail otherwise
    with pytest.raises(ConfigError, match="--tokenizer-model openai-community/gpt2 cannot be read: No such file"):
        HuggingFaceTokenizer("openai-community/gpt2")


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
    tokenizer = HuggingFaceTokenizer(saved(byte_level(), tmp_path / "tokenizer"))
    for call in (
        tokenizer.tokenize,
        tokenizer.tokenize_with_special,
        tokenizer.token_byte_spans,
        lambda text: tokenizer.encode_texts_flat(["a", text]),
    ):
        with pytest.raises(ValueError, match="surrogates"):
            call("a\ud800b")
