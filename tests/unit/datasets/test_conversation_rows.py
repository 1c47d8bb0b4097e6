"""Rows of conversations: what other programs keep is read as they read it, or refused with what to write instead."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing

from megatron.core.datasets.conversation_rows import ConversationRow, ConversationRowParser
from megatron.core.datasets.conversations import ConversationEncoder, open_conversations
from megatron.core.datasets.index_map import IndexCacheFolder
from megatron.core.datasets.indexed import DataError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from tests.helpers.chat_templates import CALL, KINDS, RESULT, TOOLS, answer, parts, save_tokenizer, user

TURNS = [user("Q1"), answer("A1"), user("Q2"), answer("A2")]


@pytest.fixture(scope="module", params=["thinks", "ends once", "channels", "reads both"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ConversationEncoder]:
    folder = tmp_path_factory.mktemp("kind")
    theirs = save_tokenizer(folder, KINDS[request.param])
    return theirs, ConversationEncoder(HuggingFaceTokenizer(folder), "tokenizer", now=None)


def learn(encoder: ConversationEncoder, row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Ids and loss mask of each conversation of a row."""
    rows = ConversationRowParser().parse_line(json.dumps(row).encode())
    encoded = encoder.encode_rows([encoder.render_row(one) for one in rows])
    return [(np.where(ids < 0, ~ids, ids).tolist(), (ids >= 0).astype(int).tolist()) for ids in encoded]


def completion_as_trl_reads_it(theirs: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """What TRL's SFTTrainer makes of a row with prompt and completion: learnt is what differs from the prompt on."""
    if isinstance(row["prompt"], str):
        completion = row["completion"]
        completion += "" if completion.endswith(theirs.eos_token) else theirs.eos_token
        start, whole = theirs(row["prompt"])["input_ids"], theirs(row["prompt"] + completion)["input_ids"]
    else:
        given = {"tools": row.get("tools"), "return_dict": False, **row.get("chat_template_kwargs", {})}
        start = theirs.apply_chat_template(row["prompt"], add_generation_prompt=True, **given)
        whole = theirs.apply_chat_template(row["prompt"] + row["completion"], **given)
    alike = next((n for n, (a, b) in enumerate(zip(start, whole)) if a != b), min(len(start), len(whole)))
    return whole, [0] * alike + [1] * (len(whole) - alike)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("Q1")], "completion": [answer("A1")]},
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"prompt": [user("Q1")], "completion": [answer("A1"), user("Q2"), answer("A2")]},
        {"prompt": [{"role": "system", "content": "S"}, user("Q1")], "completion": [answer("\n\n A1 ")]},
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": "<|im_start|>user\nQ1<|im_end|>\n", "completion": "A1</s>"},
        {"prompt": "a\n", "completion": "\n\nb"},
        {"prompt": "", "completion": "b"},
    ],
)
def test_a_prompt_with_its_completion_is_learnt_as_trl_learns_it(
    pair: tuple[Any, ConversationEncoder], row: dict[str, Any]
) -> None:
    theirs, encoder = pair
    assert learn(encoder, row) == [completion_as_trl_reads_it(theirs, row)]


def test_variables_of_a_row_reach_the_template(pair: tuple[Any, ConversationEncoder]) -> None:
    theirs, encoder = pair
    row = {
        "prompt": [user("Q1")],
        "completion": [answer("A1")],
        "chat_template_kwargs": {"enable_thinking": False, "eos_token": "<s>"},
    }
    assert learn(encoder, row) == [completion_as_trl_reads_it(theirs, row)]


def test_every_spelling_of_a_conversation_is_the_same_conversation(pair: tuple[Any, ConversationEncoder]) -> None:
    _, encoder = pair
    sharegpt = [{"from": name, "value": text} for name, text in zip(("human", "gpt") * 2, ("Q1", "A1", "Q2", "A2"))]
    expected = learn(encoder, {"messages": TURNS})
    for row in (
        {"conversations": sharegpt},
        {"messages": sharegpt},
        {"conversations": TURNS, "id": 5, "source": "x"},
        {"messages": [parts(message) for message in TURNS]},
        {"messages": [{**message, "name": None, "weight": 1} for message in TURNS], "tools": [], "prompt": "Q1"},
    ):
        assert learn(encoder, row) == expected
    system = {"role": "system", "content": "S"}
    assert learn(encoder, {"conversations": sharegpt, "system": "S"}) == learn(encoder, {"messages": [system, *TURNS]})


def test_tools_are_a_list_or_its_json() -> None:
    row = {"messages": [user("Q1"), CALL, RESULT, answer("A2")]}
    for tools in (TOOLS, json.dumps(TOOLS)):
        (result,) = ConversationRowParser().parse_line(json.dumps({**row, "tools": tools}).encode())
        assert isinstance(result, ConversationRow) and result.tools == TOOLS and result.messages == row["messages"]


REFUSED = {
    '{"text": "x"}': 'text without a prompt is read without --sft .*"prompt" and "completion"',
    '{"instruction": "x", "output": "y"}': '"prompt" and "completion", and this one has instruction, output',
    '{"prompt": "x", "chosen": "y", "rejected": "z"}': "preferences; finetune.py --finetune-task dpo",
    '{"messages": [{"role": "user", "content": "x"}], "completion": "y"}': "a row of two kinds",
    '{"prompt": "x", "completion": ""}': "the completion is empty",
    '{"prompt": "x", "completion": [{"role": "assistant", "content": "y"}]}': 'no list of "prompt"',
    '{"prompt": [{"role": "user", "content": "x"}], "completion": "y"}': 'no list of "completion"',
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]}': "weight",
    '{"conversations": [{"from": "function_call", "value": "{}"}]}': 'with "tool_calls"',
    '{"conversations": [{"from": 3, "value": "x"}]}': 'message 1 has no "role"',
    '{"conversations": [{"from": "human"}]}': 'message 1 has no text as "content"',
    '{"system": "a", "messages": [{"role": "system", "content": "b"}]}': "keep one",
    '{"images": ["x.png"], "messages": []}': "pretrain_vlm.py",
    '{"messages": [{"role": "assistant", "content": "x"}], "tools": "["}': '"tools" is text and no JSON',
    '{"messages": [{"role": "assistant", "content": "x"}], "tools": [1]}': '"tools" is no list of objects',
    '{"messages": [{"role": "assistant", "content": "x"}], "chat_template_kwargs": []}': None,
    '{"messages": [{"role": "assistant", "content": "x"}], "chat_template_kwargs": [1]}': "is no object",
}


@pytest.mark.parametrize("line", REFUSED)
def test_other_rows_are_refused_with_what_to_write(line: str) -> None:
    if REFUSED[line] is None:
        assert ConversationRowParser().parse_line(line.encode())
    else:
        with pytest.raises(DataError, match=REFUSED[line]):
            ConversationRowParser().parse_line(line.encode())


def test_what_is_not_read_is_named_once_for_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = [{**message, "train": False} for message in TURNS]
    more = {"score": 0.5, "empty": None, "tools": TOOLS}
    lines = [json.dumps({"messages": messages, "id": number, **more}) for number in range(1, 4)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    with caplog.at_level(logging.WARNING):
        open_conversations(
            str(tmp_path / "chat.jsonl"), ConversationEncoder(ByteTokenizer(), "chatml"), IndexCacheFolder(None)
        )
    tools, keys = (record.getMessage() for record in caplog.records)
    assert tools.endswith("the chat template writes nothing of the tools that rows have")
    assert keys.endswith("what rows hold besides is not read: id, score, train (of messages)")


def test_a_tokenizer_that_begins_texts_begins_a_prompt_once(tmp_path: Path) -> None:
    theirs = save_tokenizer(tmp_path, KINDS["thinks"])
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", theirs.bos_token_id)]
    )
    theirs.save_pretrained(tmp_path)
    encoder = ConversationEncoder(HuggingFaceTokenizer(tmp_path), "tokenizer")
    row = {"prompt": "Q1", "completion": "A1"}
    expected = completion_as_trl_reads_it(theirs, row)
    assert expected[0][0] == theirs.bos_token_id and learn(encoder, row) == [expected]
    assert learn(encoder, {**row, "prompt": "<s>Q1"}) == [expected]  # one begin, not two


def test_a_space_that_is_put_before_a_text_stands_behind_its_begin(tmp_path: Path) -> None:
    """As in Llama's and Mistral's newer files: the first word has a space, but not behind a mark in the text."""
    theirs = save_tokenizer(tmp_path, KINDS["thinks"])
    theirs.backend_tokenizer.pre_tokenizer = Metaspace(replacement="\u0120", prepend_scheme="first", split=False)
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", theirs.bos_token_id)]
    )
    theirs.save_pretrained(tmp_path)
    encoder = ConversationEncoder(HuggingFaceTokenizer(tmp_path), "tokenizer")
    for row in ({"prompt": "tQ", "completion": " A"}, {"prompt": "", "completion": "tA"}):
        assert learn(encoder, row) == [completion_as_trl_reads_it(theirs, row)]
