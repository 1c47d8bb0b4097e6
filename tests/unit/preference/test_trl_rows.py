"""Rows as TRL tokenizes them: id by id, with the same beginning of what is judged; or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.evaluation.reward_model import encode_reward_text
from megatron.preference.rows import PreferenceRowParser, parse_preference_rows
from tests.helpers.chat_tokenizer import write_chat_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")

USER = {"role": "user", "content": "Is it far?"}
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("No, near.", "Yes"))
TOOL = {"type": "function", "function": {"name": "walk", "parameters": {"type": "object"}}}
TURNS = [USER, GOOD, {"role": "user", "content": "And back?"}]
ROWS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
    "end of text written": {"prompt": "2 + 2 =", "chosen": " 4<|im_end|>", "rejected": " 5<|im_end|>"},
    "rendered chat": {
        "prompt": "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "chosen": "yes<|im_end|>",
        "rejected": "no<|im_end|>",
    },
    "tokens that merge": {"prompt": "the sta", "chosen": "te of", "rejected": "ble of"},
    "a space at the end": {"prompt": "Q: a A: ", "chosen": "b", "rejected": "c"},
    "no prompt": {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"},
    "an empty prompt": {"prompt": "", "chosen": "four it is", "rejected": "five"},
    "other columns": {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "source": "school", "score_chosen": 9.5},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "several turns": {"prompt": TURNS, "chosen": [GOOD], "rejected": [BAD]},
    "messages, no prompt": {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
    "an answer of several messages": {"prompt": [USER], "chosen": [GOOD, *TURNS[2:], GOOD], "rejected": [BAD]},
    "one answer goes on": {"chosen": [*TURNS, GOOD], "rejected": TURNS[:2]},
    "tools": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": [TOOL]},
    "tools as text": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": json.dumps([TOOL])},
    "variables": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "chat_template_kwargs": {"no_thoughts": True}},
}


MERGED = ("tokens that merge", "a space at the end", "variables")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, HuggingFaceTokenizer]:
    """Transformers' tokenizer and ours."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return write_chat_tokenizer(folder), HuggingFaceTokenizer(folder)


def ours(tokenizer: HuggingFaceTokenizer, row: dict[str, Any], task: Any) -> list[tuple[list[int], int]]:
    """Ids of each answer and how many of them are the prompt's."""
    parsed = PreferenceRowParser(tokenizer, "tokenizer", task).parse_row_line(json.dumps(row).encode())
    assert parsed is not None
    return [(np.where(ids < 0, ~ids, ids).tolist(), int((ids < 0).sum())) for ids in parsed.answer_ids]


def trls(theirs: Any, row: dict[str, Any], names: tuple[str, ...]) -> list[tuple[list[int], int]]:
    """The same by TRL's rule, written out: `_prepare_dataset` of its trainers of version 1."""
    prompt, answers = row.get("prompt"), [row[name] for name in names]
    if prompt is None:  # extract_prompt
        first, second = answers
        common = next((i for i in range(min(map(len, answers))) if first[i] != second[i]), min(map(len, answers)) - 1)
        common -= first[common - 1] == " "
        prompt, answers = first[:common], [answer[common:] for answer in answers]
    tools = row.get("tools")
    options = {"tools": json.loads(tools) if isinstance(tools, str) else tools, **row.get("chat_template_kwargs", {})}

    def ids(given: Any, invites: bool = False) -> list[int]:
        if isinstance(given, str):
            return list(theirs(text=given)["input_ids"])
        return list(
            theirs.apply_chat_template(given, add_generation_prompt=invites, return_dict=True, **options)["input_ids"]
        )

    if isinstance(prompt, str):
        answers = [answer if answer.endswith(theirs.eos_token) else answer + theirs.eos_token for answer in answers]
    begin, whole = ids(prompt, True) if prompt != [] else [], [ids(prompt + answer) for answer in answers]
    length = min(next((i for i, pair in enumerate(zip(begin, one)) if pair[0] != pair[1]), len(begin)) for one in whole)
    return [(one, length) for one in whole]


@pytest.mark.parametrize("name", ROWS)
def test_pairs_and_judged_answers_have_trls_ids(both: tuple[Any, HuggingFaceTokenizer], name: str) -> None:
    theirs, tokenizer = both
    row = ROWS[name]
    assert ours(tokenizer, row, "dpo") == trls(theirs, row, ("chosen", "rejected"))
    if "prompt" in row:
        judged = {**row, "completion": row["chosen"], "label": True}
        del judged["chosen"], judged["rejected"]
        assert ours(tokenizer, judged, "kto") == trls(theirs, judged, ("completion",))
    scored = {**row, "margin": 0.5, "prompt": row.get("prompt", row["chosen"][:0])}
    expected = [ids for ids, _ in trls(theirs, scored, ("chosen", "rejected"))]
    assert [ids for ids, _ in ours(tokenizer, {**row, "margin": 0.5}, "reward")] == expected
    if isinstance(row["chosen"], str):
        assert encode_reward_text(tokenizer, scored["prompt"] + row["chosen"]) == expected[0]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dpo", {**ROWS["text"], "images": [{"path": "a.png"}]}, '"images" are not read by a network of text'),
    (
        "dpo",
        {**ROWS["text"], "ref_chosen_logps": -1.0},
        '"ref_chosen_logps" are a reference.s; --preference-reference-cache',
    ),
    ("dpo", {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}, 'no "chosen" and "rejected"'),
    ("dpo", {"prompt": "a", "completion": "b", "label": True}, "are read by --finetune-task kto"),
    ("kto", ROWS["text"], "write each answer of a pair as a row of its own"),
    ("dpo", {"chosen": [USER, GOOD], "rejected": [TURNS[2], BAD]}, 'no message in common; give it as "prompt"'),
    ("dpo", {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "leave it out where they begin with it"),
    ("dpo", {**ROWS["messages"], "tools": "[walk"}, '"tools" is text and no JSON'),
    ("dpo", {**ROWS["messages"], "chat_template_kwargs": [1]}, '"chat_template_kwargs" is no object'),
    ("reward", {**ROWS["text"], "margin": float("nan")}, '"margin" is no number'),
]


@pytest.mark.parametrize("task, row, reason", REFUSED)
def test_what_has_no_counterpart_is_refused_with_the_way_out(
    both: tuple[Any, HuggingFaceTokenizer], task: Any, row: dict[str, Any], reason: str
) -> None:
    parser = PreferenceRowParser(both[1], "tokenizer", task)
    rows, dropped = parse_preference_rows([json.dumps(row).encode()], parser)
    assert not rows and re.search(reason, dropped[0][1]), dropped


def test_a_copy_of_the_question_beside_both_answers_is_no_prompt_of_its_own(
    both: tuple[Any, HuggingFaceTokenizer],
) -> None:
    """As UltraFeedback has it."""
    row = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert ours(both[1], {**row, "prompt": USER["content"]}, "dpo") == ours(both[1], row, "dpo")


def test_columns_that_trl_does_not_read_are_passed_over_and_named(both: tuple[Any, HuggingFaceTokenizer]) -> None:
    parser = PreferenceRowParser(both[1], "tokenizer")
    assert parser.parse_row_line(json.dumps({**ROWS["other columns"], "margin": 1}).encode()) is not None
    assert list(parser.unread_columns) == ["source", "score_chosen", "margin"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_trl_itself_gives_these_ids(both: tuple[Any, HuggingFaceTokenizer], name: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    import datasets

    row = ROWS[name]
    for trainer, config, names in (
        ("DPOTrainer", trl.DPOConfig, ("chosen", "rejected")),
        ("RewardTrainer", trl.RewardConfig, ("chosen", "rejected")),
    ):
        table = datasets.Dataset.from_list([row])
        args = config(output_dir=str(tmp_path), max_length=None, report_to=[], use_cpu=True, bf16=False)
        stand = object.__new__(getattr(trl, trainer))
        stand._tokenizer, stand._is_vlm = both[0], False
        made = stand._prepare_dataset(table, both[0], args, "train")[0]
        if trainer == "DPOTrainer":
            theirs = [(made["prompt_ids"] + made[f"{one}_ids"], len(made["prompt_ids"])) for one in names]
            if name in MERGED and theirs[0][1] > trls(both[0], row, names)[0][1]:
                continue  # as in 1.2, which kept the prompt whole, so that tokens of the answer were lost
            assert trls(both[0], row, names) == theirs == ours(both[1], row, "dpo")
        else:
            assert [made[f"{one}_ids"] for one in names] == [ids for ids, _ in ours(both[1], row, "reward")]
