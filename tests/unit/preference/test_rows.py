"""Lines of JSON to pairs: forms that are read, and lines that are left out with their reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed import DataError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.preference.dataset import PreferenceKind
from megatron.preference.rows import RowReader, read_rows

USER, GOOD, BAD = (
    {"role": role, "content": content}
    for role, content in (("user", "How?"), ("assistant", "So."), ("assistant", "No."))
)


@pytest.fixture
def reader() -> RowReader:
    """Bytes, and ChatML."""
    return RowReader(ByteTokenizer(), "chatml")


def text_of(ids: np.ndarray) -> tuple[str, str]:
    """Prompt and answer as text."""
    end = ByteTokenizer().eod
    parts = ([~one for one in ids if one < 0], [one for one in ids if one >= 0])
    return tuple(bytes(one for one in part if one != end).decode() for part in parts)  # type: ignore[return-value]


def test_text_is_prompt_and_answer_and_ends(reader: RowReader) -> None:
    pair = reader.read(json.dumps({"prompt": "2+2=", "chosen": "4", "rejected": "5"}).encode())
    assert pair is not None and (text_of(pair.chosen), text_of(pair.rejected)) == (("2+2=", "4"), ("2+2=", "5"))
    assert pair.chosen[-1] == ByteTokenizer().eod


def test_text_without_a_prompt_is_split_where_the_answers_part(reader: RowReader) -> None:
    pair = reader.read(json.dumps({"chosen": "2+2=4", "rejected": "2+2=5, or so"}).encode())
    assert pair is not None
    assert (text_of(pair.chosen), text_of(pair.rejected)) == (("2+2=", "4"), ("2+2=", "5, or so"))


def test_an_answer_that_only_goes_on_after_the_other_is_left_out_as_empty(reader: RowReader) -> None:
    with pytest.raises(DataError, match="an answer is empty"):
        reader.read(json.dumps({"chosen": "2+2=4", "rejected": "2+2=4, or so"}).encode())


class Framed(ByteTokenizer):
    """Begins every text with id 1 and ends it with id 2, as Llama's tokenizer may."""

    def tokenize(self, text: str) -> list[int]:
        """Bytes between the two."""
        return [1, *super().tokenize(text), 2]


def test_what_a_tokenizer_puts_around_every_text_stands_around_the_whole() -> None:
    pair = RowReader(Framed(), "chatml").read(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}).encode())
    assert pair is not None and pair.chosen.tolist() == [~1, ~ord("p"), ord("a"), Framed().eod]


@pytest.mark.parametrize("explicit", [True, False], ids=["prompt", "no prompt"])
def test_conversations_compare_their_last_answers(reader: RowReader, explicit: bool) -> None:
    before = [USER, GOOD, USER]
    row = (
        {"prompt": before, "chosen": [GOOD], "rejected": [BAD]}
        if explicit
        else {"chosen": [*before, GOOD], "rejected": [*before, BAD]}
    )
    pair = reader.read(json.dumps(row).encode())
    assert pair is not None
    prompt, answer = text_of(pair.chosen)
    assert (
        answer == "So.<|im_end|>" and prompt.count("So.") == 1 and text_of(pair.rejected) == (prompt, "No.<|im_end|>")
    )


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
def test_a_line_that_cannot_be_compared_says_why(reader: RowReader, row: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        reader.read(json.dumps(row).encode())
    assert read_rows([b"{", b"", json.dumps(row).encode()], reader)[1][0][1].startswith("not JSON")


def test_lines_that_are_left_out_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "pairs.jsonl"
    good = json.dumps({"prompt": "p", "chosen": "a", "rejected": "bc"})
    long = json.dumps({"prompt": "p" * 50, "chosen": "a", "rejected": "bc"})
    file.write_text("\n".join([good, '{"chosen": 1}', long, good]))
    kind = PreferenceKind(ByteTokenizer(), "chatml", sequence_length=16, seed=1)
    with caplog.at_level(logging.WARNING):
        source = kind.open(str(file))
        made = kind.build(source, range(3), num_samples=None, split="train", cache=None)  # type: ignore[arg-type]
    assert "1 lines are left out: line 2: no" in caplog.text and "1 of 3 rows are left out" in caplog.text
    assert len(made) == 1 and sorted(span.document for span in made.sources(0)) == [0, 0, 2, 2]
    assert made.holding(1).tolist() == [] and made.holding(2).tolist() == [0]
