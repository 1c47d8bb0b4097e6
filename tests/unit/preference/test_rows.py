"""Lines of JSON to pairs: forms that are read, and lines that are left out with their reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.cli.commands import check_config
from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.indexed import DataError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.preference.arguments import parse_preference_args
from megatron.preference.dataset import PreferenceDatasetKind
from megatron.preference.rows import PreferenceRowParser, parse_preference_rows

USER, GOOD, BAD = (
    {"role": role, "content": content}
    for role, content in (("user", "How?"), ("assistant", "So."), ("assistant", "No."))
)


@pytest.fixture
def reader() -> PreferenceRowParser:
    """Bytes, and ChatML."""
    return PreferenceRowParser(ByteTokenizer(), "chatml")


def text_of(ids: np.ndarray) -> tuple[str, str]:
    """Prompt and answer as text."""
    end = ByteTokenizer().eod
    parts = ([~one for one in ids if one < 0], [one for one in ids if one >= 0])
    return tuple(bytes(one for one in part if one != end).decode() for part in parts)  # type: ignore[return-value]


def test_text_is_prompt_and_answer_and_ends(reader: PreferenceRowParser) -> None:
    pair = reader.parse_row_line(json.dumps({"prompt": "2+2=", "chosen": "4", "rejected": "5"}).encode())
    assert pair is not None and (text_of(pair.chosen), text_of(pair.rejected)) == (("2+2=", "4"), ("2+2=", "5"))
    assert pair.chosen[-1] == ByteTokenizer().eod


def test_text_without_a_prompt_is_split_where_the_answers_part(reader: PreferenceRowParser) -> None:
    pair = reader.parse_row_line(json.dumps({"chosen": "2+2=4", "rejected": "2+2=5, or so"}).encode())
    assert pair is not None
    assert (text_of(pair.chosen), text_of(pair.rejected)) == (("2+2=", "4"), ("2+2=", "5, or so"))


def test_an_answer_that_only_goes_on_after_the_other_is_left_out_as_empty(reader: PreferenceRowParser) -> None:
    with pytest.raises(DataError, match="an answer is empty"):
        reader.parse_row_line(json.dumps({"chosen": "2+2=4", "rejected": "2+2=4, or so"}).encode())


class Framed(ByteTokenizer):
    """Begins every text with id 1 and ends it with id 2, as Llama's tokenizer may."""

    def tokenize(self, text: str) -> list[int]:
        """Bytes between the two."""
        return [1, *super().tokenize(text), 2]


def test_what_a_tokenizer_puts_around_every_text_stands_around_the_whole() -> None:
    pair = PreferenceRowParser(Framed(), "chatml").parse_row_line(
        json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}).encode()
    )
    assert pair is not None and pair.chosen.tolist() == [~1, ~ord("p"), ord("a"), Framed().eod]


@pytest.mark.parametrize("explicit", [True, False], ids=["prompt", "no prompt"])
def test_conversations_compare_their_last_answers(reader: PreferenceRowParser, explicit: bool) -> None:
    before = [USER, GOOD, USER]
    row = (
        {"prompt": before, "chosen": [GOOD], "rejected": [BAD]}
        if explicit
        else {"chosen": [*before, GOOD], "rejected": [*before, BAD]}
    )
    pair = reader.parse_row_line(json.dumps(row).encode())
    assert pair is not None
    prompt, answer = text_of(pair.chosen)
    assert answer == "So.<|im_end|>\n" and prompt.count("So.") == 1, "what follows the prompt is judged, as in TRL"
    assert text_of(pair.rejected) == (prompt, "No.<|im_end|>\n")


BROKEN: list[tuple[Any, str]] = [
    ({"chosen": "a"}, 'no "chosen" and "rejected"'),
    ({"prompt": "p", "chosen": "a", "rejected": "a"}, "the same"),
    ({"prompt": "p", "chosen": "", "rejected": "a"}, "empty"),
    ({"prompt": "p", "chosen": "a", "rejected": [GOOD]}, "both text, or both lists"),
    ({"prompt": [USER], "chosen": "a", "rejected": "b"}, '"prompt" is text'),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, "no answer of the assistant"),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [{"content": "x"}]}, 'no "role"'),
    ([], 'no "chosen" and "rejected"'),
]


@pytest.mark.parametrize("row, reason", BROKEN)
def test_a_line_that_cannot_be_compared_says_why(reader: PreferenceRowParser, row: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        reader.parse_row_line(json.dumps(row).encode())
    assert parse_preference_rows([b"{", b"", json.dumps(row).encode()], reader)[1][0][1].startswith("not JSON")


@pytest.mark.parametrize(
    "task, row, reason",
    [
        ("kto", {"prompt": "p", "completion": "a"}, 'no "prompt", "completion" and "label"'),
        ("kto", {"prompt": "p", "completion": "", "label": True}, "an answer is empty"),
        ("kto", {"prompt": "p", "completion": "a", "label": 1}, '"label" is neither true nor false'),
        ("kto", {"prompt": [USER], "completion": [USER], "label": True}, "no answer of the assistant"),
        ("reward", {"chosen": "a", "rejected": "a"}, "the same"),
        ("reward", {"chosen": "a", "rejected": ""}, "an answer is empty"),
        ("reward", {"chosen": "a", "rejected": "b", "margin": "0.5"}, '"margin" is no number'),
    ],
)
def test_a_line_of_another_task_that_cannot_be_used_says_why(task: Any, row: Any, reason: str) -> None:
    good = {"prompt": "p", "completion": "b", "label": True, "chosen": "c", "rejected": "d"}
    lines = [json.dumps(one).encode() for one in (good, row, good)]
    rows, dropped = parse_preference_rows(lines, PreferenceRowParser(ByteTokenizer(), "chatml", task))
    assert [one.line for one in rows] == [1, 3] and [number for number, _ in dropped] == [2]
    assert reason in dropped[0][1]


FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type ByteTokenizer --lora-rank 2"
)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("", None),
        ("--finetune-task kto", None),
        ("--data-path none.jsonl", "none.jsonl cannot be opened: No such file"),
        ("--data-path .", ". is a folder"),
        ("--lora-dropout 0.1", "compared by different networks; give --hidden-dropout 0 --attention-dropout 0 --lora-dropout 0"),
        ("--preference-beta 0", "must be positive"),
        ("--lora-modules-to-save *layernorm*", "no longer the reference; give it with --preference-reference"),
        ("--lora-modules-to-save *layernorm* --preference-loss simpo", None),
        ("--lora-modules-to-save *layernrom*", "--lora-modules-to-save *layernrom* matches no parameter"),
    ],
)  # fmt: skip
def test_the_run_and_the_check_of_its_flags_agree(
    flags: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both accept files of lines by their whole names, and refuse the same."""
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}')
    given = [*FLAGS.split(), "--data-path", "pairs.jsonl", *flags.split()]
    codes = []
    for ask in (lambda: check_config.main(["--entry", "finetune.py", *given]), lambda: run_accepts(given)):
        with pytest.raises(SystemExit) as end:
            ask()
        said = "".join(capsys.readouterr())
        codes.append(end.value.code)
        assert words is None or words in said, said
    assert codes == ([0, 0] if words is None else [2, 2])


def run_accepts(given: list[str]) -> None:
    """Read the flags as finetune.py does; exit with 0 if the run would start."""
    parse_preference_args(given, world_size=1, speaks=True)
    raise SystemExit(0)


def test_lines_that_are_left_out_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "pairs.jsonl"
    good = json.dumps({"prompt": "p", "chosen": "a", "rejected": "bc"})
    long = json.dumps({"prompt": "p" * 50, "chosen": "a", "rejected": "bc"})
    file.write_text("\n".join([good, '{"chosen": 1}', long, good]))
    kind = PreferenceDatasetKind(ByteTokenizer(), "chatml", sequence_length=16, seed=1)
    with caplog.at_level(logging.WARNING):
        source = kind.open(str(file))
        made = kind.build_one_split(source, SplitRequest(range(3), None, "train"))
    assert "1 lines are left out: line 2: no" in caplog.text and "1 of 3 rows are left out" in caplog.text
    assert "do not fit into --seq-length 16: line 3\n" in caplog.text
    assert len(made) == 1 and sorted(span.document for span in made.token_sources(0)) == [0, 0, 2, 2]
    assert made.samples_with_document(1).tolist() == [] and made.samples_with_document(2).tolist() == [0]
