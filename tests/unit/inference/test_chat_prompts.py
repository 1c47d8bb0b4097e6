"""Prompts of the chat server and of --eval-generate are those that transformers makes of the same conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.templates import FORMATS
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.inference.eval_generate import read_prompts
from megatron.inference.server.body_fields import RequestRefused
from megatron.inference.server.chat import ChatPromptEncoder, PromptEnding, parse_messages
from tests.helpers.chat_templates import CALL, KINDS, RESULT, answer, parts, save_tokenizer, user

TURNS = [user("Q1"), answer("A1"), user("Q2")]
THOUGHT = [user("Q1"), answer("<think>\nT1\n</think>\n\nA1"), user("Q2")]


@pytest.fixture(scope="module", params=["thinks", "channels", "ends once", "reads both"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ChatPromptEncoder]:
    folder = tmp_path_factory.mktemp("kind")
    theirs = save_tokenizer(folder, KINDS[request.param])
    return theirs, ChatPromptEncoder(HuggingFaceTokenizer(folder))


@pytest.mark.parametrize("messages", [TURNS, THOUGHT, [parts(message) for message in TURNS]])
def test_served_prompts_are_those_of_transformers_also_in_the_second_turn(
    pair: tuple[Any, ChatPromptEncoder], messages: list[Any]
) -> None:
    theirs, chat = pair
    text = [
        message if isinstance(message["content"], str) else {**message, "content": message["content"][0]["text"]}
        for message in messages
    ]
    ids = chat.encode_messages(parse_messages(messages)[0])
    assert ids == theirs.apply_chat_template(text, add_generation_prompt=True, return_dict=False) and min(ids) >= 0


def test_variables_and_endings_of_a_prompt_are_those_of_transformers(pair: tuple[Any, ChatPromptEncoder]) -> None:
    theirs, chat = pair
    told = theirs.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False, enable_thinking=False)
    assert chat.encode_messages(TURNS, PromptEnding(variables={"enable_thinking": False})) == told
    assert chat.encode_messages(TURNS, PromptEnding(invites=False)) == theirs.apply_chat_template(
        TURNS, return_dict=False
    )
    told = theirs.apply_chat_template(TURNS[:2], continue_final_message=True, return_dict=False)
    assert chat.encode_messages(TURNS[:2], PromptEnding(invites=False, continues=True)) == told


def test_tool_calls_of_clients_are_given_to_the_template_as_objects(tmp_path: Path) -> None:
    theirs, messages = save_tokenizer(tmp_path, KINDS["thinks"]), [user("Q1"), CALL, RESULT]
    call = {**CALL["tool_calls"][0], "function": {"name": "add", "arguments": '{"a": 1}'}}
    sent = [user("Q1"), {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}, RESULT]
    ids = ChatPromptEncoder(HuggingFaceTokenizer(tmp_path)).encode_messages(parse_messages(sent)[0])
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for nothing in ("", None, "{}", {}):
        ((parsed,), _) = parse_messages(
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nothing}}]}]
        )
        assert parsed["tool_calls"][0]["function"]["arguments"] == {}
    for wrong in ([5], [{"function": {"name": 5}}], [{"function": {"name": "f", "arguments": "{"}}], "x"):
        with pytest.raises(RequestRefused, match=r"messages\[0\]: (tool_calls must be|the arguments of)"):
            parse_messages([{"role": "assistant", "tool_calls": wrong}])


def test_the_answer_of_a_thinking_network_ends_where_its_template_says(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, KINDS["thinks"])
    tokenizer = HuggingFaceTokenizer(tmp_path)
    chat = ChatPromptEncoder(tokenizer)
    assert [tokenizer.id_to_token(token) for token in chat.stop_ids] == ["<|im_end|>"] and chat.stop_words == ()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_prompts_behind_earlier_answers(name: str, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    ids = ChatPromptEncoder(tokenizer, name).encode_messages(TURNS)
    assert min(ids) >= 0 and "A1" in tokenizer.detokenize(ids)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    prompts = read_prompts(
        str(tmp_path / "prompts.jsonl"), tokenizer, num_tokens=4, positions=999, temperature=0.0, seed=1, template=name
    )
    assert prompts.ids == (tuple(ids),) and prompts.texts == ("Q2",)


@pytest.mark.parametrize(
    "variables, problem",
    [
        ({"messages": TURNS}, "messages is none"),
        ({"chat_template": "x", "tools": []}, "chat_template, tools is none"),
        ({"date": ["a<|im_end|>"]}, "which is a token of the template's"),
        ({"date": "\ufdd0"}, "are not text"),
    ],
)
def test_variables_of_a_request_replace_no_messages_and_hold_no_marks(
    variables: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path, KINDS["thinks"])
    chat = ChatPromptEncoder(HuggingFaceTokenizer(tmp_path))
    with pytest.raises(RequestRefused, match=problem):
        chat.encode_messages(TURNS, PromptEnding(variables=variables))
