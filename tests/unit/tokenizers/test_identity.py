"""The fingerprint: equal for one vocabulary however it is written and wherever it lies, different for any other."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.base import hash_parts, tokenizer_fingerprint_fields
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.bytelevel import vocab_token_to_bytes

DATA = Path(__file__).resolve().parents[3] / "examples" / "data"
VOCAB, MERGES = DATA / "demo-vocab.json", DATA / "demo-merges.txt"


def mark(kind, **settings):
    """The fingerprint of what the settings say."""
    return tokenizer_fingerprint_fields(
        build_tokenizer(
            TokenizerConfig(
                tokenizer_type=kind,
                **{name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
            )
        )
    )


def as_tokenizer_json(folder, **changes):
    """The demo vocabulary as a tokenizer.json."""
    merges = [tuple(line.split(" ")) for line in MERGES.read_text("utf-8").split("\n")[1:-1]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=json.loads(VOCAB.read_text("utf-8")), merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(made.to_str()), **changes}), "utf-8")
    return path


def as_ranks(folder):
    """The demo vocabulary as lines of ranks; id 0 stays free for the end of document."""
    path = folder / "demo.tiktoken"
    vocab = {token: number for token, number in json.loads(VOCAB.read_text("utf-8")).items() if number}
    path.write_text(
        "".join(
            f"{base64.b64encode(vocab_token_to_bytes(token)).decode()} {number}\n" for token, number in vocab.items()
        )
    )
    return path


def test_three_ways_to_write_one_vocabulary_have_one_hash(tmp_path):
    marks = [
        mark("GPT2BPETokenizer", vocab_file=VOCAB, merge_file=MERGES),
        mark("HuggingFaceTokenizer", tokenizer_model=as_tokenizer_json(tmp_path)),
        mark("TikTokenizer", tokenizer_model=as_ranks(tmp_path), tiktoken_pattern="gpt2"),
    ]
    assert len({result.pop("kind") for result in marks}) == 3
    assert marks[0] == marks[1] == marks[2] and marks[0]["vocab_size"] == 8000 and marks[0]["eod"] == 0
    assert len(marks[0]["hash"]) == 64


def test_the_place_of_the_files_does_not_matter(tmp_path):
    copies = [
        Path(shutil.copy(path, tmp_path))
        for path in (VOCAB, MERGES, DATA / "demo-llama.model", DATA / "demo-bert-vocab.txt")
    ]
    for kind, here, there in [
        (
            "GPT2BPETokenizer",
            dict(vocab_file=VOCAB, merge_file=MERGES),
            dict(vocab_file=copies[0], merge_file=copies[1]),
        ),
        ("Llama2Tokenizer", dict(tokenizer_model=DATA / "demo-llama.model"), dict(tokenizer_model=copies[2])),
        ("BertWordPieceCase", dict(vocab_file=DATA / "demo-bert-vocab.txt"), dict(vocab_file=copies[3])),
    ]:
        assert mark(kind, **here) == mark(kind, **there)


def test_whatever_changes_ids_changes_the_hash(tmp_path):
    swapped, shorter = tmp_path / "swapped.json", tmp_path / "shorter.txt"
    vocab = json.loads(VOCAB.read_text("utf-8"))
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    swapped.write_text(json.dumps(vocab), "utf-8")
    shorter.write_text("\n".join(MERGES.read_text("utf-8").split("\n")[:-5]), "utf-8")
    bert, llama = dict(vocab_file=DATA / "demo-bert-vocab.txt"), dict(tokenizer_model=DATA / "demo-llama.model")
    framed = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "framed").mkdir()
    around = as_tokenizer_json(tmp_path / "framed", post_processor=framed)
    lower = as_tokenizer_json(tmp_path, normalizer={"type": "Lowercase"})
    ranks = as_ranks(tmp_path)
    marks = [
        mark("GPT2BPETokenizer", vocab_file=VOCAB, merge_file=MERGES),
        mark("GPT2BPETokenizer", vocab_file=swapped, merge_file=MERGES),
        mark("GPT2BPETokenizer", vocab_file=VOCAB, merge_file=shorter),
        mark("HuggingFaceTokenizer", tokenizer_model=lower),
        mark("HuggingFaceTokenizer", tokenizer_model=around),
        mark("TikTokenizer", tokenizer_model=ranks, tiktoken_pattern="v1"),
        mark("TikTokenizer", tokenizer_model=ranks, tiktoken_pattern="v2"),
        mark("TikTokenizer", tokenizer_model=ranks, tiktoken_pattern="gpt2", tokenizer_special_tokens=("</s>",)),
        mark("BertWordPieceCase", **bert),
        mark("BertWordPieceLowerCase", **bert),
        mark("BertWordPieceCase", **bert, vocab_extra_ids=1),
        *(mark(f"{kind}Tokenizer", **llama) for kind in ("SentencePiece", "GPTSentencePiece", "Llama2")),
        mark("ByteTokenizer"),
        mark("NullTokenizer", vocab_size=256),
        mark("NullTokenizer", vocab_size=256, null_tokenizer_eod_id=1),
    ]
    assert len({result["hash"] for result in marks}) == len(marks)


@pytest.mark.parametrize(
    "left, right", [([b"ab", b"c"], [b"a", b"bc"]), ([b"", b"a"], [b"a", b""]), ([b"a"], [b"a", b""])]
)
def test_a_digest_knows_where_parts_end(left, right):
    assert hash_parts(left) != hash_parts(right)
