"""Byte-level BPE against the published algorithm written out, and against two other readers of the same files."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import regex
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2TokenizerFast

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.bpe import GPT2BPETokenizer

DATA = Path(__file__).resolve().parents[3] / "examples" / "data"
FILES = {
    "demo": (DATA / "demo-vocab.json", DATA / "demo-merges.txt"),
    "gpt2": (DATA / "gpt2" / "vocab.json", DATA / "gpt2" / "merges.txt"),
}
TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "  two  spaces,\ttabs\r\nand\n\n\nlines  ",
    "I'll say it's 12345.67% done, don't you? We'VE",
    "na\u00efve caf\u00e9 \u2014 \u6771\u4eac \U0001f30d\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\u00a0\u2028\u0301 \u043d\u0435\u0442 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\x00\x01\x7f\ufeff\uffff",
    "def f(x):\n    return x ** 2  # <tag> [INST] </s>",
    "a" * 300,
]


def load(name):
    """The tokenizer of one of the two pairs of files."""
    return GPT2BPETokenizer(*FILES[name])


def demo_documents():
    """Texts of the demo corpus."""
    with open(DATA / "demo_valid.jsonl", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def by_the_paper(name):
    """Text to ids: words by the published expression, then the earliest merge of each word until none is left."""
    vocab = json.loads(FILES[name][0].read_text(encoding="utf-8"))
    merges = FILES[name][1].read_text(encoding="utf-8").split("\n")[1:]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(merges) if line}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    @lru_cache(None)
    def pieces(word):
        parts = [letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:]))
            best = min(pairs, key=lambda pair: ranks.get(pair, 1e9))
            if best not in ranks:
                break
            joined, at = [], 0
            while at < len(parts):
                twice = tuple(parts[at : at + 2]) == best
                joined.append("".join(best) if twice else parts[at])
                at += 2 if twice else 1
            parts = joined
        return [vocab[part] for part in parts]

    return lambda text: [token for word in words.findall(text) for token in pieces(word)]


@pytest.mark.parametrize("name", FILES)
def test_ids_equal_the_published_algorithm(name):
    tokenizer, reference = load(name), by_the_paper(name)
    for text in TEXTS + [text[:20_000] for text in demo_documents()]:
        assert tokenizer.tokenize(text) == reference(text), text[:80]


@pytest.mark.parametrize("name", FILES)
def test_ids_equal_two_other_readers_on_the_demo_corpus(name):
    vocab_file, merge_file = map(str, FILES[name])
    tokenizer = load(name)
    theirs = ByteLevelBPETokenizer(vocab_file, merge_file)
    published = GPT2TokenizerFast(vocab=vocab_file, merges=merge_file)
    texts = TEXTS + demo_documents()
    batch, lengths = tokenizer.encode_texts_flat(texts)
    for text, ids in zip(texts, np.split(batch, np.cumsum(lengths)[:-1])):
        ids = ids.tolist()
        assert ids == tokenizer.tokenize(text) == theirs.encode(text).ids == published(text)["input_ids"], text[:80]
        assert tokenizer.detokenize(ids) == text


def test_the_published_sizes_and_ids_hold():
    tokenizer = load("gpt2")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (50257, 50256, None)
    assert tokenizer.tokenize("Hello world") == [15496, 995]
    assert tokenizer.detokenize([50256]) == "<|endoftext|>"


@pytest.mark.parametrize("name", FILES)
def test_a_document_cannot_forge_the_end_of_another(name):
    tokenizer = load(name)
    text = "one<|endoftext|>two <|endoftext|>"
    ids = tokenizer.tokenize(text)
    assert tokenizer.eod not in ids and tokenizer.eod not in tokenizer.encode_texts_flat([text])[0]
    assert tokenizer.detokenize(ids) == text


def test_cut_characters_become_replacement_characters():
    tokenizer = load("gpt2")
    ids = tokenizer.tokenize("\u6771")
    assert len(ids) > 1 and tokenizer.detokenize(ids[:1]) == "\ufffd"


def test_half_of_a_surrogate_pair_is_refused():
    tokenizer = load("demo")
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.tokenize("a\ud800b")
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode_texts_flat(["fine", "a\ud800b"])


def test_identifiers_tell_tokenizers_apart(tmp_path):
    merges = tmp_path / "merges.txt"
    merges.write_text("\n".join(FILES["demo"][1].read_text(encoding="utf-8").split("\n")[:-5]), encoding="utf-8")
    shorter = GPT2BPETokenizer(FILES["demo"][0], merges)
    assert load("demo").unique_identifiers == load("demo").unique_identifiers
    assert len({json.dumps(t.unique_identifiers) for t in (load("demo"), load("gpt2"), shorter)}) == 3


def change(name, tmp_path, edit):
    """The demo files with one of them changed: (vocab, merges)."""
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_bytes(FILES["demo"][0].read_bytes())
    merges.write_bytes(FILES["demo"][1].read_bytes())
    target = vocab if name == "vocab" else merges
    target.write_bytes(edit(target.read_bytes()))
    return vocab, merges


def edited_vocab(edit):
    """An edit of the parsed vocabulary, as an edit of its bytes."""

    def apply(content: bytes) -> bytes:
        vocab = json.loads(content)
        edit(vocab)
        return json.dumps(vocab).encode()

    return apply


@pytest.mark.parametrize(
    "name, edit, message",
    [
        ("vocab", lambda content: content.split(b",")[0], r"--vocab-file .*vocab\.json is not JSON"),
        ("vocab", lambda content: b"\xff\xfe", r"--vocab-file .* is not UTF-8"),
        ("vocab", lambda content: b"[1, 2]", "not a JSON object of tokens"),
        ("vocab", lambda content: b'{"a": "b"}', "not a JSON object of tokens"),
        ("vocab", edited_vocab(lambda vocab: vocab.pop("<|endoftext|>")), r"no token <\|endoftext\|>"),
        ("vocab", edited_vocab(lambda vocab: vocab.update({"!": 5})), "one number to several tokens"),
        ("vocab", edited_vocab(lambda vocab: vocab.pop("!")), "1 of the 256 bytes have no token, among them '!'"),
        (
            "vocab",
            edited_vocab(lambda vocab: vocab.pop("\u0120the")),
            r"merges\.txt, line \d+: '\u0120t he' .* do not belong together",
        ),
        ("merges", lambda content: content + b"x y z\n", r"line 7745: 'x y z'"),
        ("merges", lambda content: content[:-3], r"line 7744"),
        ("merges", lambda content: b"\xff", r"--merge-file .* is not UTF-8"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, edit, message):
    with pytest.raises(ConfigError, match=message):
        GPT2BPETokenizer(*change(name, tmp_path, edit))


@pytest.mark.parametrize("missing, flag", [(0, "--vocab-file"), (1, "--merge-file")])
def test_a_missing_file_is_named(missing, flag):
    files = list(FILES["demo"])
    files[missing] = Path("not/there")
    with pytest.raises(ConfigError, match=f"{flag} not/there cannot be read: No such file"):
        GPT2BPETokenizer(*files)
