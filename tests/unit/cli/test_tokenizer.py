"""megatron tokenizer: what it trains is read by others, what it shows is true, and its exit code says whether all is well."""

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from transformers import GPT2TokenizerFast

from megatron.cli.commands import tokenizer as tool
from megatron.core.tokenizers.difficult_texts import DIFFICULT

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "examples" / "data"
DEMO = [
    "--tokenizer-type",
    "GPT2BPETokenizer",
    "--vocab-file",
    str(DATA / "demo-vocab.json"),
    "--merge-file",
    str(DATA / "demo-merges.txt"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A byte-level BPE learnt from the demo's valid split."""
    folder = tmp_path_factory.mktemp("trained")
    assert (
        tool.main(
            [
                "train",
                "--input",
                str(DATA / "demo_valid.jsonl"),
                "--vocab-size",
                "700",
                "--output-dir",
                str(folder),
                "--special-tokens",
                "<|endoftext|>",
                "<pad>",
            ]
        )
        == 0
    )
    return folder


def documents():
    """Texts of the demo's valid split."""
    with open(DATA / "demo_valid.jsonl", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def pairs_learnt(texts, count):
    """The first merges by the published rule, on words cut as GPT-2 does, ties by the order of the ids."""
    cut = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {}
    for text in texts:
        for word, _ in cut.pre_tokenize_str(text):
            words[word] = words.get(word, 0) + 1
    split = {word: list(word) for word in words}
    learnt = []
    for _ in range(count):
        seen = {}
        for word, parts in split.items():
            for pair in zip(parts, parts[1:]):
                seen[pair] = seen.get(pair, 0) + words[word]
        best = max(seen.values())
        learnt.append({pair for pair, times in seen.items() if times == best})
        left, right = min(learnt[-1])
        for word, parts in split.items():
            place = 0
            while place < len(parts) - 1:
                if (parts[place], parts[place + 1]) == (left, right):
                    parts[place : place + 2] = [left + right]
                place += 1
    return learnt


def test_the_first_merges_are_the_most_frequent_pairs(trained):
    merges = [tuple(line.split(" ")) for line in (trained / "merges.txt").read_text("utf-8").split("\n")[1:-1]]
    expected = pairs_learnt(documents(), 12)
    for merge, best in zip(merges, expected):
        assert merge in best
        if len(best) > 1:
            break  # a tie: from here on there are several right answers


def test_a_trained_vocabulary_is_read_by_other_libraries(trained):
    files = [str(trained / name) for name in ("vocab.json", "merges.txt", "tokenizer.json")]
    theirs, same = GPT2TokenizerFast(vocab=files[0], merges=files[1]), tokenizers.Tokenizer.from_file(files[2])
    vocab = json.loads((trained / "vocab.json").read_text("utf-8"))
    assert len(vocab) == 700 and vocab["<|endoftext|>"] == 0 and vocab["<pad>"] == 1
    for text in [*documents()[:3], *DIFFICULT.values()]:
        if "<" not in text:
            assert theirs(text).input_ids == same.encode(text).ids
        assert same.decode(same.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_training_is_repeatable_and_reads_compressed_lines(trained, tmp_path):
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress((DATA / "demo_valid.jsonl").read_bytes()))
    assert (
        tool.main(
            [
                "train",
                "--input",
                str(packed),
                "--vocab-size",
                "700",
                "--output-dir",
                str(tmp_path / "again"),
                "--special-tokens",
                "<|endoftext|>",
                "<pad>",
            ]
        )
        == 0
    )
    for path in trained.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_a_folder_of_texts_is_read_as_the_documents_that_preprocessing_finds(tmp_path, capsys):
    """A vocabulary learns the break between paragraphs, which no line holds."""
    (tmp_path / "corpus").mkdir()
    for number in range(30):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"one {number}\n\ntwo\n\n\nthree", "utf-8")
    train = ["train", "--input", str(tmp_path / "corpus"), "--vocab-size", "280", "--output-dir"]
    assert tool.main([*train, str(tmp_path / "files")]) == 0
    assert "read 30 texts\n" in capsys.readouterr().err
    assert "\u010a\u010a" in json.loads((tmp_path / "files" / "vocab.json").read_text("utf-8"))
    assert tool.main([*train, str(tmp_path / "lines"), "--text-documents", "line"]) == 0
    assert "read 90 texts" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_trained_sentencepiece_model_is_read_by_the_library(tmp_path, capsys, kind):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(documents()[0].split("\n")[:400]) + "\n\x00 zero\n", "utf-8")
    assert (
        tool.main(
            [
                "train",
                "--kind",
                kind,
                "--keep-whitespace",
                "--input",
                str(corpus),
                "--vocab-size",
                "600",
                "--special-tokens",
                "<sep>",
                "--output-dir",
                str(tmp_path),
            ]
        )
        == 0
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert len(theirs) == 600 and [theirs.id_to_piece(number) for number in range(5)] == [
        "<unk>",
        "<s>",
        "</s>",
        "<pad>",
        "<sep>",
    ]
    assert theirs.decode(theirs.encode("  two  \u6771 spaces\n\n")) == "  two  \u6771 spaces\n\n"
    assert theirs.piece_to_id("<sep>") not in theirs.encode("a<sep>b")
    assert "use it with --tokenizer-type GPTSentencePieceTokenizer" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--vocab-size", "200"], "no room for the 256 bytes"),
        (["--vocab-size", "400", "--special-tokens", "a"], "longer than a letter"),
        (["--vocab-size", "400", "--special-tokens"], "at least one name"),
        (["--vocab-size", "400", "--keep-whitespace"], "--keep-whitespace is for SentencePiece"),
        (["--vocab-size", "400", "--kind", "bpe", "--special-tokens", "<s>"], "none of <unk> <s> </s> <pad>"),
        (["--vocab-size", "100000000", "--kind", "unigram"], "no model can be learnt"),
        (["--vocab-size", "400", "--input", "not/there"], "there is no such file"),
    ],
)
def test_what_cannot_be_trained_is_named_and_leaves_nothing(tmp_path, capsys, words, message):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some text\n" * 20)
    assert tool.main(["train", "--input", str(corpus), "--output-dir", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_check_ends_with_one_when_something_is_wrong(trained, capsys):
    words = ["check", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(trained)]
    assert tool.main([*words, "--input", str(DATA / "demo_valid.jsonl"), "--padded-vocab-size", "768"]) == 0
    shown = capsys.readouterr().out
    assert "corpus: 19 texts, 584052 bytes" in shown and "nothing is wrong" in shown and "hash " in shown
    assert tool.main([*words, "--padded-vocab-size", "699"]) == 1
    assert "wrong: 1 ids are beyond the model's 699" in capsys.readouterr().out
    assert tool.main([*words, "--strict"]) == 1 and tool.main(["check", *DEMO[:-1], "not/there"]) == 2


def test_encode_shows_ids_tokens_and_bytes(capsys):
    text = "caf\u00e9 <|endoftext|>"
    assert tool.main(["encode", *DEMO, "--json", "--", text]) == 0
    shown = json.loads(capsys.readouterr().out)
    theirs = GPT2TokenizerFast(vocab=DEMO[3], merges=DEMO[5], split_special_tokens=True)
    assert shown["ids"] == theirs(text).input_ids and shown["tokens"] == theirs.convert_ids_to_tokens(shown["ids"])
    assert b"".join(text.encode()[slice(*span)] for span in shown["spans"]) == text.encode()
    assert tool.main(["encode", *DEMO, "--ids-only", "--marked", "--", text]) == 0
    assert capsys.readouterr().out.split()[-1] == "0"
    assert tool.main(["encode", *DEMO, "--", "caf\u00e9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == r"b'\xa9'" or "b'caf" in capsys.readouterr().out


def test_decode_gives_the_text_of_ids_from_the_command_line_and_standard_input(monkeypatch, capsys):
    ids = GPT2TokenizerFast(vocab=DEMO[3], merges=DEMO[5])("Call me \u6771.").input_ids
    assert tool.main(["decode", *map(str, ids), *DEMO]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(str, ids))))
    assert tool.main(["decode", *DEMO]) == 0
    assert capsys.readouterr().out == "Call me \u6771.\n" * 2
    assert tool.main(["decode", "8000", *DEMO]) == 2 and "8000 is not an id" in capsys.readouterr().err


def test_help_is_there_without_loading_libraries():
    code = (
        "import sys\nfrom megatron.cli.commands import tokenizer\ntry:\n    tokenizer.main(['check', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'sentencepiece', 'pyarrow') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.endswith("[]\n") and "--padded-vocab-size" in shown and "Tokenizer:" in shown
