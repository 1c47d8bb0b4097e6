"""TikTokenizer against tiktoken itself, in both forms of file."""

import base64
import inspect
import json
import random
from pathlib import Path

import pytest
import tiktoken
from tiktoken_ext import openai_public
from transformers.convert_slow_tokenizer import TikTokenConverter

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers import tiktoken as tiktoken_module
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields
from megatron.core.tokenizers.bpe import GPT2BPETokenizer
from megatron.core.tokenizers.difficult_texts import DIFFICULT
from megatron.core.tokenizers.engines import PATTERNS
from megatron.core.tokenizers.tiktoken import TikTokenizer

ROOT = Path(__file__).resolve().parents[3]
GPT2 = (ROOT / "examples" / "data" / "gpt2" / "vocab.json", ROOT / "examples" / "data" / "gpt2" / "merges.txt")
R50K = ROOT.parent / "shared" / "data" / "tokenizers" / "tiktoken" / "r50k_base.tiktoken"


def printable():
    """The letters of bytes as tiktoken finds them: what prints stands for itself, the rest counts up from 256."""
    plain = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(rest)}


def gpt2_tokens(count):
    """The first tokens of GPT-2 in bytes, by rank, the single bytes in order of value."""
    letters = printable()
    vocab = json.loads(GPT2[0].read_text(encoding="utf-8"))
    tokens = [bytes(letters[letter] for letter in token) for token in vocab if token != "<|endoftext|>"][:count]
    return sorted(tokens[:256]) + tokens[256:]


@pytest.fixture(scope="module")
def json_file(tmp_path_factory):
    """3,000 ranks in Megatron's form."""
    path = tmp_path_factory.mktemp("ranks") / "vocab.json"
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(gpt2_tokens(3000))
    ]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("pattern", ["v1", "v2", "gpt2"])
def test_ids_of_a_json_file_are_tiktokens_behind_the_special_tokens(json_file, pattern):
    tokenizer = TikTokenizer(json_file, pattern, num_special=20)
    theirs = tiktoken.Encoding(
        "theirs",
        pat_str=PATTERNS[pattern],
        special_tokens={},
        mergeable_ranks={token: 20 + rank for rank, token in enumerate(gpt2_tokens(3000))},
    )
    texts = list(DIFFICULT.values())
    expected = [theirs.encode_ordinary(text) for text in texts]
    assert [tokenizer.tokenize(text) for text in texts] == expected
    ids, lengths = tokenizer.encode_texts_flat(texts)
    assert ids.tolist() == [token for ids in expected for token in ids] and lengths.tolist() == list(map(len, expected))
    assert [tokenizer.detokenize(ids) for ids in expected] == texts
    assert tokenizer.vocab_size == 3020


def test_special_tokens_take_the_first_ids_and_end_documents(json_file):
    tokenizer = TikTokenizer(json_file, "v2", num_special=1000, vocab_size=2000)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.eod) == (2000, 1, 2, 2)
    assert (tokenizer.mask, tokenizer.pad, tokenizer.cls, tokenizer.sep) == (3, 4, 5, 6)
    assert tokenizer.id_to_token(17) == "<SPECIAL_17>" and tokenizer.tokenize_with_special("</s>") == [2]
    assert 2 not in tokenizer.tokenize("</s>") and 4 not in tokenizer.special_ids
    local = TikTokenizer(json_file, "v2", num_special=4, names=["<s>", "</s>", "<unk>", "<|im_end|>"])
    assert (local.bos, local.eod, local.pad, local.tokenize_with_special("a<|im_end|>")[-1]) == (0, 1, None, 3)


def test_the_plain_file_of_gpt2_is_gpt2():
    if not R50K.exists():
        pytest.skip("the published rank file is not here")
    tokenizer, gpt2 = TikTokenizer(R50K, None), GPT2BPETokenizer(*GPT2)
    assert tokenizer_fingerprint_fields(tokenizer) == {**tokenizer_fingerprint_fields(gpt2), "kind": "TikTokenizer"}
    for text in DIFFICULT.values():
        assert tokenizer.tokenize(text) == gpt2.tokenize(text)
    assert tokenizer.eod == gpt2.eod == 50256


def plain_lines(count=400):
    """Lines of tiktoken's own form."""
    return [base64.b64encode(token).decode() + f" {rank}" for rank, token in enumerate(gpt2_tokens(count))]


def test_a_plain_file_has_its_end_of_document_at_the_first_free_id(tmp_path):
    path = tmp_path / "mine.tiktoken"
    lines = plain_lines()
    moved = [*lines[:300], *(f"{line.split()[0]} {int(line.split()[1]) + 1}" for line in lines[300:])]
    path.write_text("\n".join(moved) + "\n")
    tokenizer = TikTokenizer(path, "gpt2")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.special) == (401, 300, {"<|endoftext|>": 300})
    assert tokenizer.detokenize([300, 301]) == "<|endoftext|>" + gpt2_tokens(400)[300].decode(errors="replace")


def test_a_plain_file_of_unknown_name_must_be_told_its_pattern(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_text("\n".join(plain_lines()))
    with pytest.raises(ConfigError, match="does not say how text is cut into words; add --tiktoken-pattern"):
        TikTokenizer(path, None)


@pytest.mark.parametrize("name", ["cl100k", "o200k"])
def test_published_patterns_have_tiktokens_ids_and_their_name_says_which(tmp_path, monkeypatch, name):
    monkeypatch.setattr(
        openai_public,
        "load_tiktoken_bpe",
        lambda *_, **__: {token: rank for rank, token in enumerate(gpt2_tokens(3000))},
    )
    theirs = tiktoken.Encoding(**getattr(openai_public, f"{name}_base")())
    path = tmp_path / f"{name}_base.tiktoken"
    path.write_text("\n".join(plain_lines(3000)))
    tokenizer = TikTokenizer(path, None)
    texts = [*DIFFICULT.values(), "We'LL see 12345 it's\n\n  \nHTTPServer's"]
    assert [tokenizer.tokenize(text) for text in texts] == [theirs.encode_ordinary(text) for text in texts]
    monkeypatch.setattr(tiktoken_module, "PUBLISHED_ENDS", {name: (3000, 3005)})
    published = TikTokenizer(path, name)
    assert (published.eod, published.vocab_size, tokenizer.eod) == (3005, 3006, 3000)


def test_the_published_ends_are_tiktokens(monkeypatch):
    for name, (count, end) in tiktoken_module.PUBLISHED_ENDS.items():
        monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
        special = getattr(openai_public, f"{name}_base")()["special_tokens"]
        assert special["<|endoftext|>"] == end == count + 1


def test_llama_3_has_its_pattern_and_special_tokens(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_text("\n".join(plain_lines(3000)))
    tokenizer = TikTokenizer(path, "llama3")
    assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (3000, 3001, 3002)
    assert tokenizer.special == {"<|begin_of_text|>": 3000, "<|end_of_text|>": 3001}
    published = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    theirs = tiktoken.Encoding(
        "llama3",
        pat_str=published,
        special_tokens={},
        mergeable_ranks={token: rank for rank, token in enumerate(gpt2_tokens(3000))},
    )
    texts = [*DIFFICULT.values(), "We'LL see 12345 it's\n\n  \nHTTPServer's"]
    assert [tokenizer.tokenize(text) for text in texts] == [theirs.encode_ordinary(text) for text in texts]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda lines: lines[:200], "cut short: 56 of the 256 bytes have no rank"),
        (lambda lines: [*lines, "YQ== x"], "line 401, is not base64 and a rank"),
        (lambda lines: [*lines, "YQ=="], "line 401, is not base64 and a rank"),
        (lambda lines: [*lines, "Y 400"], "token 400 is not base64"),
        (lambda lines: [*lines, "YQ== 400"], "one token at several ranks"),
        (lambda lines: [*lines, "enp6eno= 7"], "one rank to several tokens"),
        (lambda lines: [*lines, f"enp6eno= {2**31}"], "a rank beyond 2"),
    ],
)
def test_damaged_plain_files_are_named(tmp_path, damage, message):
    path = tmp_path / "gpt2.tiktoken"
    path.write_text("\n".join(damage(plain_lines())))
    with pytest.raises(ConfigError, match=f"--tokenizer-model .*gpt2.tiktoken.*{message}"):
        TikTokenizer(path, None)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda rows: rows[:100], "--vocab-size .* is 0 special|the 256 bytes"),
        (lambda rows: {"a": 1}, "is not a list of objects"),
        (lambda rows: [*rows[:300], {"rank": 300}], "is not a list of objects"),
        (lambda rows: rows[:10] + rows[11:], "token 10 has rank 11"),
        (lambda rows: [{**rows[0], "token_bytes": "*"}, *rows[1:]], "token 0 is not base64"),
        (lambda rows: [{**rows[0], "token_bytes": 5}, *rows[1:]], "token 0 is not base64"),
        (lambda rows: [{**rows[0], "token_bytes": ""}, *rows[1:]], "no token is empty"),
        (lambda rows: [rows[1] | {"rank": 0}, *rows[1:]], "one token at several ranks"),
    ],
)
def test_damaged_json_files_are_named(json_file, tmp_path, damage, message):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(damage(json.loads(json_file.read_text()))))
    with pytest.raises(ConfigError, match=message):
        TikTokenizer(path, "v2", num_special=7)


def test_a_file_cut_anywhere_is_refused_or_read_as_far_as_it_is_whole(json_file, tmp_path):
    content, path = json_file.read_bytes(), tmp_path / "vocab.json"
    for length in random.Random(1).sample(range(len(content)), 10):
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match="is not JSON"):
            TikTokenizer(path, "v2", num_special=7)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(num_special=2), "contain <unk>, <s>, </s>"),
        (dict(names=["<s>", "</s>"]), "contain <unk>, <s>, </s>"),
        (dict(num_special=9, names=["<unk>", "<s>", "</s>", "<s>"]), "differ from each other"),
        (dict(num_special=9, names=["<unk>", "<s>", "</s>", "<SPECIAL_8>"]), "names a filler"),
        (dict(num_special=9, vocab_size=200), "give 265 to 3009"),
        (dict(num_special=9, vocab_size=3010), "give 265 to 3009"),
    ],
)
def test_settings_that_do_not_fit_the_file_are_named(json_file, settings, message):
    with pytest.raises(ConfigError, match=message):
        TikTokenizer(json_file, "v2", **settings)


def test_settings_of_the_json_form_are_refused_for_a_plain_file(tmp_path):
    path = tmp_path / "gpt2.tiktoken"
    path.write_text("\n".join(plain_lines()))
    with pytest.raises(ConfigError, match="--vocab-size 300 is for JSON rank files"):
        TikTokenizer(path, None, vocab_size=300)
    with pytest.raises(ConfigError, match="has none of </s>, "):
        TikTokenizer(path, None, names=["<end>"])
