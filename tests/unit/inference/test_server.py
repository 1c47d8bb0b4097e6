"""The server over loopback: every field and limit of its three ways to be asked, and what becomes of those who leave."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.core.tokenizers.generation_config import GenerationDefaults
from megatron.inference.beam import beam_search
from megatron.inference.detokenizer import IncrementalTokenTexts
from megatron.inference.requests import GenerationReply, GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.inference.server.app import LOCAL, EventStream, host_without_port, with_keepalives
from megatron.inference.server.http_server import bind_socket
from megatron.inference.server.openai import CHAT
from megatron.inference.server.put_api import parse_put_body
from megatron.inference.server.serving import GenerationServing, RequestLimits
from tests.unit.inference.clients import NAME, POSITIONS, Answer, Running, bytes_engine, serving, until

GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One for all tests that leave it as it was."""
    with serving(
        bytes_engine(together=8, block=8), limits=RequestLimits(body_bytes=20_000, prompts=16, new_tokens=240)
    ) as running:
        yield running


def alone(prompt: str, count: int, **changes: Any) -> GenerationReply:
    """What the engine says without a server."""
    (reply,) = bytes_engine().run(
        [GenerationRequest(tuple(prompt.encode()), count, **{"sampling": SamplingParams(0.0), **changes})]
    )
    return reply


PUT_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no prompts": ({}, "prompts argument required"),
    "a text": ({"prompts": "a"}, "prompts is not a list of strings"),
    "numbers": ({"prompts": [1]}, "prompts is not a list of strings"),
    "none": ({"prompts": []}, "prompts is empty"),
    "null": ({"prompts": None}, "prompts is not a list of strings"),
    "too many": ({"prompts": ["a"] * 17}, "Maximum number of prompts is 16"),
    "empty": ({"prompts": ["a", ""]}, "Empty prompts require add_BOS=true"),
    "old name of prompts": ({"sentences": ["a"]}, "sentences is no longer used"),
    "old name of count": ({"max_len": 3}, "max_len is no longer used"),
    "misspelt": ({"tokens_to_generat": 3}, "is tokens_to_generate meant"),
    "count negative": ({"tokens_to_generate": -1}, "tokens_to_generate must be an integer greater than or equal to 0"),
    "count float": ({"tokens_to_generate": 3.0}, "tokens_to_generate must be an integer"),
    "count boolean": ({"tokens_to_generate": True}, "tokens_to_generate must be an integer"),
    "count 0": ({"tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs should be True"),
    "count over the limit": ({"tokens_to_generate": 241}, "this server gives 240"),
    "longer than the positions": ({"prompts": ["a" * 100], "tokens_to_generate": 200}, f"{POSITIONS} positions"),
    "logprobs": ({"logprobs": 1}, "logprobs must be a boolean value"),
    "temperature 0": ({"temperature": 0}, "temperature must be a positive number less than or equal to 100.0"),
    "temperature high": ({"temperature": 100.1}, "temperature must be a positive number"),
    "temperature text": ({"temperature": "1"}, "temperature must be a positive number"),
    "top_k": ({"top_k": 1001}, "top_k must be an integer equal to or greater than 0 and less than or equal to 1000"),
    "top_k negative": ({"top_k": -1}, "top_k must be"),
    "top_p": ({"top_p": 1.1}, "top_p must be a positive float less than or equal to 1.0"),
    "top_p and top_k": ({"top_p": 0.5, "top_k": 2}, "cannot set both top-k and top-p samplings."),
    "decay": ({"top_p": 0.5, "top_p_decay": 1.5}, "top_p_decay must be a positive float"),
    "decay alone": ({"top_p_decay": 0.5}, "top_p_decay cannot be set without top_p"),
    "bound": ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound must be a positive float less than or equal to top_p"),
    "bound 0": ({"top_p": 0.5, "top_p_bound": 0.0}, "top_p_bound must be a positive float"),
    "bound alone": ({"top_p_bound": 0.5}, "top_p_bound cannot be set without top_p"),
    "add_BOS": ({"add_BOS": "yes"}, "add_BOS must be a boolean value"),
    "stop_on_eol": ({"stop_on_eol": 1}, "stop_on_eol must be a boolean value"),
    "stop_on_double_eol": ({"stop_on_double_eol": 1}, "stop_on_double_eol must be a boolean value"),
    "colon": ({"prevent_newline_after_colon": 1}, "prevent_newline_after_colon must be a boolean value"),
    "no_log": ({"no_log": 0}, "no_log must be a boolean value"),
    "seed": ({"random_seed": -1}, "random_seed must be a positive integer"),
    "beam": ({"beam_width": 0}, "beam_width must be an integer"),
    "beams of two": ({"beam_width": 2, "prompts": ["a", "b"]}, "When doing beam_search, batch size must be 1"),
    "stop_token": ({"stop_token": 257}, "stop_token must be below 257"),
    "penalty": ({"length_penalty": "x"}, "length_penalty must be a float"),
    "half a pair": ({"prompts": ["\ud800"]}, "the prompt cannot be read"),
}


@pytest.mark.parametrize("name", PUT_WRONG)
def test_put_api_refuses_with_a_message(server: Running, name: str) -> None:
    changes, said = PUT_WRONG[name]
    answer = server.api(**(changes if name in ("no prompts", "old name of prompts") else {"prompts": ["a"], **changes}))
    assert answer.status == 400 and said in answer.json["message"], answer


def test_put_api_says_all_that_is_wrong_at_once(server: Running) -> None:
    answer = server.api(prompts=["a"], top_k=-1, temperature=0)
    assert answer.status == 400 and "top_k" in answer.text and "temperature" in answer.text


def test_put_api_continues_prompts_as_the_engine_does(server: Running) -> None:
    found = server.api(prompts=["abc", "xy"], tokens_to_generate=6, top_k=1, logprobs=True).json
    for place, prompt in enumerate(["abc", "xy"]):
        expected = alone(prompt, 6, logprobs=True, prompt_logprobs=True)
        assert (
            found["text"][place] == prompt + expected.text
            and "".join(found["segments"][place]) == prompt + expected.text
        )
        scores = [token.logprob for token in (*expected.prompt[1:], *expected.tokens)]
        assert (
            found["logprobs"][place] == pytest.approx(scores, abs=1e-9) and found["reasons"][place] == expected.reason
        )


def test_put_api_gives_64_tokens_and_no_scores_unless_asked(server: Running) -> None:
    found = server.api(prompts=["abc"], top_k=1).json
    assert found["text"] == ["abc" + alone("abc", 64).text] and found["logprobs"] is None


def test_put_api_only_scores_when_no_tokens_are_asked_for(server: Running) -> None:
    found = server.api(prompts=["abc"], tokens_to_generate=0, logprobs=True).json
    expected = alone("abc", 0, prompt_logprobs=True)
    assert found["text"] == ["abc"] and found["logprobs"][0] == pytest.approx(
        [token.logprob for token in expected.prompt[1:]], abs=1e-9
    )


def test_put_api_draws_by_its_seed_and_settings(server: Running) -> None:
    asked = {
        "prompts": ["abc", "abc"],
        "tokens_to_generate": 12,
        "top_p": 0.9,
        "top_p_decay": 0.9,
        "top_p_bound": 0.2,
        "temperature": 1.5,
        "random_seed": 5,
    }
    found = server.api(**asked).json["text"]
    sampling = SamplingParams(1.5, top_p=0.9, top_p_decay=0.9, top_p_bound=0.2)
    assert (
        found == ["abc" + alone("abc", 12, sampling=sampling, seed=seed).text for seed in (5, 6)]
        and found[0] != found[1]
    )


def test_put_api_begins_with_the_token_between_documents(server: Running) -> None:
    (reply,) = bytes_engine().run([GenerationRequest((256,), 8, SamplingParams(0.0))])
    assert server.api(prompts=[""], add_BOS=True, tokens_to_generate=8, top_k=1).json["text"] == [reply.text]


def test_put_api_stops_where_it_is_told(server: Running) -> None:
    free = alone("abc", 30, ignore_eod=True).ids
    stop = free[7]
    found = server.api(prompts=["abc"], tokens_to_generate=30, top_k=1, stop_token=stop, logprobs=True).json
    assert found["reasons"] == ["stop"] and len(found["logprobs"][0]) == 2 + free.index(stop)


def test_put_api_hands_its_switches_to_the_engine(server: Running) -> None:
    def asked(**body: Any) -> GenerationRequest:
        return parse_put_body(json.dumps({"prompts": ["a"], **body}).encode(), GenerationServing(server.service, NAME))[
            1
        ][0]

    plain, switched = (
        asked(),
        asked(stop_on_eol=True, stop_on_double_eol=True, prevent_newline_after_colon=True, no_log=True),
    )
    assert (plain.stop_words, plain.newline_after_colon, plain.ignore_eod) == ((), True, False)
    assert (switched.stop_words, switched.keep_stop, switched.newline_after_colon) == (("\n", "\n\n"), True, False)


def test_put_api_searches_beams(server: Running) -> None:
    beams = beam_search(bytes_engine().run, tuple(b"abc"), width=3, num_tokens=5, ends=(256,), length_penalty=2.0)
    found = server.api(prompts=["abc"], tokens_to_generate=5, beam_width=3, length_penalty=2.0).json
    assert (
        found["scores"] == pytest.approx([beam.score for beam in beams], abs=1e-9)
        and len(found["text"]) == len(found["segments"]) == 3
    )


COMPLETION_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "prompt argument required"),
    "prompt": ({"prompt": 5}, "prompt must be"),
    "no prompts": ({"prompt": []}, "prompt must be"),
    "mixed": ({"prompt": ["a", 5]}, "prompt must be"),
    "empty ids": ({"prompt": [[]]}, "prompt must be"),
    "ids": ({"prompt": [257]}, "from 0 to 256"),
    "ids negative": ({"prompt": [[1], [-1]], "echo": True}, "from 0 to 256"),
    "max_tokens": ({"max_tokens": -1}, "max_tokens must be an integer"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens=0 only scores"),
    "temperature": ({"temperature": 2.1}, "temperature must be a number from 0.0 to 2.0"),
    "top_p": ({"top_p": -0.1}, "top_p must be"),
    "top_k": ({"top_k": -1}, "top_k must be"),
    "min_p": ({"min_p": 2}, "min_p must be"),
    "penalty": ({"repetition_penalty": 0}, "repetition_penalty"),
    "n": ({"n": 0}, "n must be"),
    "n times prompts": ({"n": 9, "prompt": ["a", "b"]}, "more than the 16 texts"),
    "best_of": ({"best_of": 2}, "best_of must be n"),
    "logprobs": ({"logprobs": 21}, "logprobs must be"),
    "logprobs boolean": ({"logprobs": True}, "logprobs must be"),
    "stop": ({"stop": ["a"] * 17}, "stop must be"),
    "stop empty": ({"stop": ""}, "stop must be"),
    "seed": ({"seed": 1.5}, "seed must be"),
    "stream": ({"stream": "yes"}, "stream must be a boolean"),
    "options": ({"stream_options": {"include_usage": True}}, "needs stream"),
    "echo of scores in a stream": ({"echo": True, "logprobs": 1, "stream": True}, "not streamed"),
    "frequency": ({"frequency_penalty": 2.5}, "frequency_penalty must be a number from -2.0 to 2.0"),
    "presence": ({"presence_penalty": "1"}, "presence_penalty must be a number"),
    "bias": ({"logit_bias": {"5": 1}}, "can only be {}"),
    "suffix": ({"suffix": "x"}, "suffix can only be"),
    "unknown": ({"tokens": 5}, "is not a field"),
    "too long": ({"prompt": "a" * 250}, f"{POSITIONS} positions"),
}
CHAT_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({}, "messages argument required"),
    "none": ({"messages": []}, "one at least"),
    "text": ({"messages": "a"}, "must be a list"),
    "a text in it": ({"messages": ["a"]}, "messages[0] must be an object"),
    "role": ({"messages": [{"role": "king", "content": "a"}]}, "role must be"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, "content must be"),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "with a function that has a name"),
    "nothing said": ({"messages": [{"role": "assistant", "tool_calls": []}]}, "content must be"),
    "a key": ({"messages": [{"role": "user", "content": "a", "nome": "b"}]}, "'nome', which is not served"),
    "both endings": ({"continue_final_message": True, "add_generation_prompt": True}, "the last answer goes on"),
    "a question continued": ({"continue_final_message": True}, "is no answer whose end"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be a data URL"),
    "reserved": ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "not text"),
    "half a pair": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    "tools": ({"tools": [{}]}, "tools can only be []"),
    "both counts": ({"max_tokens": 1, "max_completion_tokens": 1}, "give one of them"),
    "top_logprobs": ({"top_logprobs": 2}, "needs logprobs"),
    "logprobs": ({"logprobs": 2}, "logprobs must be a boolean"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens must be"),
    "format": ({"response_format": {"type": "json_object"}}, "response_format can only be"),
    "effort": ({"reasoning_effort": "high"}, "reasoning_effort can only be"),
    "functions": ({"functions": [{"name": "f"}]}, "functions can only be"),
    "audio": ({"audio": {"voice": "a"}}, "'audio' is not a field"),
}


@pytest.mark.parametrize("name", COMPLETION_WRONG)
def test_completions_refuse_with_a_message(server: Running, name: str) -> None:
    changes, said = COMPLETION_WRONG[name]
    answer = server.complete(**(changes if name == "no prompt" else {"prompt": "a", **changes}))
    assert answer.status == 400 and said in answer.json["error"]["message"], answer


@pytest.mark.parametrize("name", CHAT_WRONG)
def test_conversations_refuse_with_a_message(server: Running, name: str) -> None:
    changes, said = CHAT_WRONG[name]
    answer = server.converse(
        **(changes if name == "no messages" else {"messages": [{"role": "user", "content": "a"}], **changes})
    )
    assert answer.status == 400 and said in answer.json["error"]["message"], answer


# Fields that OpenAI's clients send, with values that ask for nothing here.
NOTHING: dict[str, Any] = {
    **{"service_tier": "auto", "parallel_tool_calls": True, "prompt_cache_key": "a", "prompt_cache_retention": "24h"},
    **{"safety_identifier": "a", "functions": [], "function_call": "none", "reasoning_effort": "none"},
    **{"verbosity": "medium", "store": False, "metadata": {"a": "b"}, "user": "a", "tools": [], "tool_choice": "none"},
    **{"logit_bias": {}, "modalities": ["text"], "response_format": {"type": "text"}},
}
ANOTHER_SERVICE = {"audio", "moderation", "prediction", "prompt_cache_options", "web_search_options"}


def test_what_openais_clients_send_is_known(server: Running) -> None:
    """Fields that ask for nothing change nothing; those that ask for another service are refused by name."""
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **GREEDY}
    answers = [server.converse(**asked, **fields).json["choices"] for fields in ({}, NOTHING)]
    assert answers[0] == answers[1]
    client = pytest.importorskip("openai.resources.chat.completions", reason="openai is not installed")
    sent = set(inspect.signature(client.Completions.create).parameters)
    sent -= {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert sent - {field.name for field in CHAT} <= ANOTHER_SERVICE


def test_completions_answer_texts_and_ids_alike(server: Running) -> None:
    expected = alone("abc", 16)
    for prompt in ("abc", list(b"abc"), ["abc"], [list(b"abc")]):
        found = server.complete(prompt=prompt, model=NAME, **GREEDY).json
        assert [(choice["text"], choice["finish_reason"]) for choice in found["choices"]] == [(expected.text, "length")]
        assert (
            found["usage"]["prompt_tokens"] == 3
            and found["usage"]["completion_tokens"] == 16
            and found["usage"]["total_tokens"] == 19
        )


def test_completions_echo_and_score_the_prompt(server: Running) -> None:
    expected = alone("abc", 4, logprobs=True, prompt_logprobs=True, top_logprobs=2)
    (choice,) = server.complete(prompt="abc", max_tokens=4, echo=True, logprobs=2, **GREEDY).json["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == "abc" + expected.text == "".join(scores["tokens"]) and scores["token_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == pytest.approx(
        [token.logprob for token in (*expected.prompt[1:], *expected.tokens)], abs=1e-9
    )
    assert [sorted(top.values()) for top in scores["top_logprobs"][1:]] == [
        pytest.approx(sorted(score for _, score in token.top), abs=1e-9)
        for token in (*expected.prompt[1:], *expected.tokens)
    ]
    assert all(
        ("abc" + expected.text)[offset:].startswith(piece)
        for offset, piece in zip(scores["text_offset"], scores["tokens"], strict=True)
    )


def test_each_of_several_choices_has_a_seed_of_its_own(server: Running) -> None:
    found = server.complete(prompt=["ab", "cd"], n=2, seed=7, max_tokens=8, top_p=0.8).json["choices"]
    expected = [
        alone(prompt, 8, sampling=SamplingParams(top_p=0.8), seed=seed).text
        for prompt in ("ab", "cd")
        for seed in (7, 8)
    ]
    assert [choice["text"] for choice in found] == expected and [choice["index"] for choice in found] == [0, 1, 2, 3]


def test_a_temperature_or_top_p_of_next_to_nothing_takes_the_likeliest(server: Running) -> None:
    expected = alone("abc", 8).text
    for settings in ({"temperature": 1e-320}, {"top_p": 0.0}):
        assert server.complete(prompt="abc", max_tokens=8, **settings).json["choices"][0]["text"] == expected


def test_penalties_are_those_of_the_engine(server: Running) -> None:
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1}
    expected = alone("abc", 30, sampling=SamplingParams(0.0, **penalties))  # type: ignore[arg-type]
    assert expected.text != alone("abc", 30).text
    for ask in ({}, {"stream": True}):
        answer = server.complete(prompt="abc", max_tokens=30, **penalties, **GREEDY, **ask)
        rows = chunks(answer) if ask else [answer.json]
        assert "".join(choice["text"] for row in rows for choice in row["choices"]) == expected.text


def test_what_a_call_leaves_out_is_as_the_folder_says() -> None:
    said = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    defaults = GenerationDefaults(sampling=said, num_tokens=7, stop_words=("qq",))
    with serving(bytes_engine(), defaults=defaults) as server:
        expected = alone("abc", 12, sampling=SamplingParams(**said), seed=3, stop_words=("qq",))  # type: ignore[arg-type]
        found = server.complete(prompt="abc", max_tokens=12, seed=3).json["choices"][0]
        assert found["text"] == expected.text
        own = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        other = alone("abc", 12, sampling=SamplingParams(**own), seed=3)  # type: ignore[arg-type]
        assert server.complete(prompt="abc", max_tokens=12, seed=3, **own).json["choices"][0]["text"] == other.text
        assert other.text != expected.text
        messages = [{"role": "user", "content": "a"}]
        assert server.converse(messages=messages, ignore_eos=True).json["usage"]["completion_tokens"] == 7


def test_a_stop_word_ends_a_text_and_is_not_in_it(server: Running) -> None:
    free = alone("abc", 40, ignore_eod=True).text
    word = free[5:7]
    (choice,) = server.complete(prompt="abc", max_tokens=40, stop=word, ignore_eos=True, **GREEDY).json["choices"]
    assert choice == {"index": 0, "text": free[: free.index(word)], "logprobs": None, "finish_reason": "stop"}


def chunks(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last, nothing = answer.text.split("\n\n")
    assert last == "data: [DONE]" and nothing == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_stream_says_what_the_whole_answer_says(server: Running) -> None:
    asked = {"prompt": ["abc", "d"], "max_tokens": 20, "logprobs": 1, **GREEDY}
    whole = server.complete(**asked).json
    *said, last = chunks(server.complete(stream=True, stream_options={"include_usage": True}, **asked))
    assert (
        last["choices"] == []
        and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        and said[0]["usage"] is None
    )
    for choice in whole["choices"]:
        mine = [one for chunk in said for one in chunk["choices"] if one["index"] == choice["index"]]
        assert (
            "".join(one["text"] for one in mine) == choice["text"]
            and mine[-1]["finish_reason"] == choice["finish_reason"]
        )
        assert [score for one in mine for score in one["logprobs"]["token_logprobs"]] == pytest.approx(
            choice["logprobs"]["token_logprobs"]
        )
        assert [piece for one in mine for piece in one["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_a_streamed_echo_begins_with_the_prompt(server: Running) -> None:
    said = chunks(server.complete(prompt="abc", echo=True, stream=True, max_tokens=3, **GREEDY))
    assert "".join(chunk["choices"][0]["text"] for chunk in said) == "abc" + alone("abc", 3).text


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_prompt_that_ends_inside_a_character_is_continued_from_there(server: Running, cut: int) -> None:
    prompt = [*b"ab", *"\U0001f600".encode()[:cut]]
    (reply,) = bytes_engine().run([GenerationRequest(tuple(prompt), 12, SamplingParams(0.0), ignore_eod=True)])
    whole = ByteTokenizer().detokenize([*prompt, *reply.ids])
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, **GREEDY}
    (choice,) = server.complete(**body, echo=True, logprobs=1).json["choices"]
    assert choice["text"] == whole == "".join(choice["logprobs"]["tokens"])
    streamed = [
        choice for chunk in chunks(server.complete(**body, echo=True, stream=True)) for choice in chunk["choices"]
    ]
    assert "".join(choice["text"] for choice in streamed) == whole
    scored = [
        choice for chunk in chunks(server.complete(**body, logprobs=1, stream=True)) for choice in chunk["choices"]
    ]
    told = "".join(choice["text"] for choice in scored)
    assert told == whole[len("ab" if cut < 4 else "ab\U0001f600") :] == reply.text
    fields = [choice["logprobs"] for choice in scored if choice["logprobs"]]
    assert "".join(piece for field in fields for piece in field["tokens"]) == told
    assert sum(len(field["token_logprobs"]) for field in fields) == 12


def test_a_conversation_is_written_by_its_template(server: Running) -> None:
    prompt = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    messages = [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
    ]
    expected = alone(prompt, 10, logprobs=True)
    found = server.converse(messages=messages, max_completion_tokens=10, logprobs=True, top_logprobs=1, **GREEDY).json
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None} and found["usage"][
        "prompt_tokens"
    ] == len(prompt)
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == pytest.approx(
        [token.logprob for token in expected.tokens], abs=1e-9
    )
    said = chunks(server.converse(messages=messages, max_tokens=10, stream=True, **GREEDY))
    assert said[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in said) == expected.text


def test_a_conversation_may_fill_what_is_left_of_the_positions(server: Running) -> None:
    found = server.converse(messages=[{"role": "user", "content": "a"}], ignore_eos=True, **GREEDY).json
    assert found["usage"]["total_tokens"] == POSITIONS + 1  # the last token is never read


def test_health_models_and_metrics(server: Running) -> None:
    assert server.ask("GET", "/health").json == {"status": "ok"}
    assert (
        server.ask("GET", "/v1/models").json["data"][0]["id"] == NAME
        and server.ask("GET", f"/v1/models/{NAME}").status == 200
    )
    assert server.ask("GET", "/v1/models/other").status == server.complete(prompt="a", model="other").status == 404

    def numbers() -> dict[str, float]:
        lines = [line for line in server.ask("GET", "/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = numbers()
    assert server.complete(prompt="abc", max_tokens=5, ignore_eos=True).status == 200
    after, name = numbers(), "megatron_inference_"
    assert after[name + "generated_tokens_total"] - before[name + "generated_tokens_total"] == 5
    ok = name + 'http_answers_total{path="/v1/completions",status="200"}'
    assert after[ok] - before.get(ok, 0) == 1 and after[name + "cache_blocks_used"] == 0


def test_the_page_asks_for_nothing_from_elsewhere(server: Running) -> None:
    answer = server.ask("GET", "/")
    assert answer.status == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
    assert (
        "</html>" in answer.text
        and "http://" not in answer.text
        and "https://" not in answer.text
        and " src=" not in answer.text
    )


@pytest.mark.parametrize(
    "method, path, body, headers, status",
    [
        ("GET", "/nothing", None, {}, 404),
        ("GET", "/api", None, {}, 405),
        ("PUT", "/v1/completions", {}, {}, 405),
        ("PUT", "/api", b"{}", {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/completions", b"{}", {"Content-Type": ""}, 415),
        ("PUT", "/api", b"x" * 20_001, {}, 413),
        ("PUT", "/api", b"[]", {}, 400),
        ("PUT", "/api", b"[" * 15_000, {}, 400),
        ("PUT", "/api", b'{"prompts": ["a"], "temperature": NaN}', {}, 400),
        ("PUT", "/api", b'{"prompts": ["a"], "temperature": 1e999}', {}, 400),
        ("PUT", "/api", b'{"prompts": ["a"], "random_seed": ' + b"9" * 5000 + b"}", {}, 400),
        ("PUT", "/api", b"\xff\xfe", {}, 400),
        ("PUT", "/api", b"", {}, 400),
    ],
)
def test_what_is_no_call_is_refused(
    server: Running, method: str, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    assert server.ask(method, path, body, headers).status == status


def test_who_leaves_before_the_first_word_is_not_decoded() -> None:
    class CompletionRequest:
        cancelled = False

        def cancel_all(self) -> None:
            self.cancelled = True

    async def words() -> AsyncIterator[str]:
        yield "never heard"

    async def gone(*_: Any) -> None:
        raise OSError("the client has left")

    call = CompletionRequest()
    with pytest.raises(BaseException):
        asyncio.run(EventStream(call, words())({"type": "http", "asgi": {"spec_version": "2.3"}}, gone, gone))
    assert call.cancelled


@pytest.mark.parametrize("streams", [True, False])
def test_who_leaves_is_not_decoded_any_further(server: Running, streams: bool) -> None:
    before = server.service.engine.metrics().finished["cancelled"]
    with server.begin(
        "/v1/completions", {"prompt": "abc", "max_tokens": 240, "ignore_eos": True, "stream": streams, "n": 8}
    ):
        until(lambda: server.service.engine.metrics().running)
    server.settle()
    assert (
        server.service.engine.metrics().finished["cancelled"] == before + 8
        and server.service.engine.metrics().blocks_used == 0
    )


def test_who_finds_no_room_to_wait_is_told_to_come_again() -> None:
    with serving(bytes_engine(together=1, waiting=1)) as server:
        with server.begin(
            "/v1/completions", {"prompt": "abc", "max_tokens": 250, "ignore_eos": True, "stream": True}
        ) as first:
            assert first.recv(12) == b"HTTP/1.1 200"
            until(lambda: server.service.engine.metrics().running)  # until then it waits itself
            answer = server.complete(prompt=["a"] * 4, max_tokens=2)
            assert (
                answer.status == 429
                and answer.headers["retry-after"] == "1"
                and "wait already" in answer.json["error"]["message"]
            )
            # Of a call that is refused nothing is decoded, not even what there was room for.
            until(lambda: server.service.engine.metrics().finished["cancelled"] == 2)
        server.settle()
        assert server.complete(prompt="a", max_tokens=2).status == 200


def test_a_token_keeps_strangers_out() -> None:
    with serving(bytes_engine(), token="secret", chat="") as server:
        for path in ("/v1/models", "/metrics"):
            assert (
                server.ask("GET", path).status
                == server.ask("GET", path, headers={"Authorization": "Bearer secre"}).status
                == 401
            )
            assert server.ask("GET", path, headers={"Authorization": "Bearer secret"}).status == 200
        assert (
            server.api(prompts=["a"]).status == 401
            and server.ask("GET", "/").status == server.ask("GET", "/health").status == 200
        )
        answer = server.ask(
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            {"Authorization": "Bearer secret"},
        )
        assert answer.status == 400 and "has no chat template" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "host, status",
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:5000", 200),
        ("localhost.", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("", 421),
        ("localhost:80:80", 421),
    ],
)
def test_only_names_of_this_machine_may_be_called(server: Running, host: str, status: int) -> None:
    for method, path, body in (("GET", "/", None), ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})):
        answer = server.ask(method, path, body, {"Host": host})
        assert answer.status == status and (status == 200 or "--allowed-hosts" in answer.json["error"]["message"])
    assert host_without_port(host.encode()) in LOCAL or status == 421


def test_a_long_silence_has_signs_of_life_in_it() -> None:
    async def words() -> AsyncIterator[str]:
        yield "first"
        await asyncio.sleep(0.2)
        yield "last"

    async def heard(seconds: float) -> list[str]:
        return [word async for word in with_keepalives(words(), seconds)]

    found = asyncio.run(heard(0.03))
    assert (found[0], found[-1]) == ("first", "last") and set(found[1:-1]) == {": not yet\n\n"} and len(found) > 3
    assert asyncio.run(heard(60.0)) == ["first", "last"]


def test_a_stream_that_is_left_in_its_silence_ends_what_it_waits_for() -> None:
    ended: list[str] = []

    async def words() -> AsyncIterator[str]:
        try:
            yield "first"
            await asyncio.sleep(60)
        finally:
            ended.append("words")

    async def leave() -> None:
        stream = with_keepalives(words(), 0.01)
        assert [await anext(stream), await anext(stream)] == ["first", ": not yet\n\n"]
        await stream.aclose()
        assert ended == ["words"]

    asyncio.run(leave())


def test_while_it_drains_health_says_so_and_new_calls_are_turned_away() -> None:
    answers: list[Answer] = []
    with serving(bytes_engine()) as server:
        thread = threading.Thread(
            target=lambda: answers.append(server.complete(prompt="a", max_tokens=250, ignore_eos=True, n=32))
        )
        thread.start()
        until(lambda: server.service.engine.metrics().running)
        server.server.should_exit = True
        until(lambda: server.service.closing_reason)
        health, call = server.ask("GET", "/health"), server.complete(prompt="a")
        assert not answers, "the call in flight was over too soon to prove anything"
    thread.join(30)
    assert health.status == 503 and health.json["status"] == "draining"
    assert call.status == 503 and call.headers["retry-after"] and "about to end" in call.json["error"]["message"]
    assert [choice["finish_reason"] for choice in answers[0].json["choices"]] == ["length"] * 32


@pytest.mark.parametrize("seconds, reasons", [(30.0, {"length"}), (0.0, {"cancelled"})])
def test_the_end_finishes_what_runs_or_gives_what_there_is(seconds: float, reasons: set[str]) -> None:
    answers: list[Answer] = []
    with serving(bytes_engine(together=4), drain_seconds=seconds) as server:
        thread = threading.Thread(
            target=lambda: answers.append(server.complete(prompt=["a"] * 6, max_tokens=200, ignore_eos=True, **GREEDY))
        )
        thread.start()
        until(lambda: server.service.engine.metrics().running)
    thread.join(30)
    found = {choice["finish_reason"] for choice in answers[0].json["choices"]}
    assert answers[0].status == 200 and found == reasons


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_ends_the_server_and_tells_who_waits() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a rank is gone")

    with serving(bytes_engine()) as server:
        server.service.engine.runner.launch = broken  # type: ignore[method-assign]
        answer = server.complete(prompt="a")
        assert answer.status == 500 and "a rank is gone" in answer.json["error"]["message"]
        server.thread.join(30)
        assert not server.thread.is_alive() and "a rank is gone" in server.service.failure_reason


def test_a_port_that_is_taken_is_refused() -> None:
    with bind_socket("127.0.0.1", 0) as other:
        other.listen()
        with pytest.raises(ConfigError, match=r"--host 127.0.0.1 --port \d+ cannot be had: .*in use"):
            bind_socket("127.0.0.1", other.getsockname()[1])


def test_text_of_ids_is_the_same_however_they_come() -> None:
    tokenizer = bytes_engine().tokenizer
    ids = tokenizer.tokenize("a\u20acb\U0001f600 and more than sixteen bytes \u00e4")
    spelling = IncrementalTokenTexts(tokenizer)
    one_by_one = [
        piece
        for place, token in enumerate(ids)
        for piece in spelling.texts_of_next_ids([token], last=place + 1 == len(ids))
    ]
    assert one_by_one == IncrementalTokenTexts(tokenizer).texts_of_next_ids(ids, last=True) and bytes(
        ids
    ).decode() == "".join(one_by_one)
    assert one_by_one[1:4] == ["", "", "\u20ac"]


def test_openais_client_reads_it_unmodified(server: Running) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed; requirements-dev.txt brings it")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        found = client.completions.create(model=NAME, prompt="abc", max_tokens=6, temperature=0, logprobs=2)
        assert found.choices[0].text == alone("abc", 6).text and len(found.choices[0].logprobs.token_logprobs) == 6
        messages = [{"role": "user", "content": "Hi"}]
        whole = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
        )
        stream = client.chat.completions.create(model=NAME, messages=messages, max_tokens=6, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="temperature must be"):
            client.completions.create(model=NAME, prompt="abc", temperature=3)
        with pytest.raises(openai.NotFoundError, match="no model"):
            client.completions.create(model="other", prompt="abc")
