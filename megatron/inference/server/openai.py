"""/v1/completions and /v1/chat/completions, as OpenAI's clients ask and read them; whole, or as server-sent events.

    body -> CompletionRequest -> requests of the engine -> an answer, or chunks of it

Beyond OpenAI's: top_k, min_p, repetition_penalty, ignore_eos; and a finish_reason cancelled when the server ends before the text
does. What a request leaves out is as generation_config.json says. What cannot be served (a bias, tools) is refused unless it asks
for nothing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.tokenizers.incremental import decode_certain
from megatron.inference.detokenizer import IncrementalTokenTexts, TokenText
from megatron.inference.requests import GenerationEvent, GenerationReply, GenerationRequest, TokenLogprob
from megatron.inference.sampling import SamplingParams
from megatron.inference.server.body_fields import (
    BodyField,
    RequestRefused,
    boolean_problem,
    integer_range_check,
    is_integer,
    no_problem,
    number_range_check,
    one_of_check,
    read_body_fields,
    text_problem,
)
from megatron.inference.server.chat import ChatPromptEncoder, parse_messages, prompt_ending_of_fields
from megatron.inference.server.request_handling import HTTPCallRequests
from megatron.inference.server.serving import (
    LEAST_LOGPROB,
    GenerationServing,
    clamped_logprob,
    round_tiny_temperature_to_zero,
)

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_MOST_TOP, _MOST_CHOICES, _MOST_STOPS, _LONGEST_STOP = 20, 128, 16, 1000


def _prompt_problem(value: Any) -> str:
    ids = (
        isinstance(value, list)
        and bool(value)
        and (
            all(map(is_integer, value))
            or all(isinstance(part, list) and part and all(map(is_integer, part)) for part in value)
        )
    )
    texts = isinstance(value, list) and bool(value) and all(isinstance(part, str) for part in value)
    return (
        ""
        if isinstance(value, str) or texts or ids
        else "must be a string, ids, or a list of strings or of lists of ids"
    )


def _stop_problem(value: Any) -> str:
    words = [value] if isinstance(value, str) else value
    good = (
        isinstance(words, list)
        and len(words) <= _MOST_STOPS
        and all(isinstance(word, str) and 0 < len(word) <= _LONGEST_STOP for word in words)
    )
    return "" if good else f"must be a string, or at most {_MOST_STOPS} of them, of 1 to {_LONGEST_STOP} characters"


def _stream_options_problem(value: Any) -> str:
    good = (
        isinstance(value, dict)
        and set(value) <= {"include_usage", "include_obfuscation"}
        and all(isinstance(one, bool) for one in value.values())
    )
    return "" if good else "must be an object with include_usage, a boolean value"


def _object_problem(value: Any) -> str:
    return "" if isinstance(value, dict) else "must be an object"


_COMMON = (
    BodyField("model", text_problem),
    BodyField("temperature", number_range_check(0.0, 2.0)),
    BodyField("top_p", number_range_check(0.0, 1.0)),
    BodyField("top_k", integer_range_check(0, 10**6)),
    BodyField("min_p", number_range_check(0.0, 1.0)),
    BodyField("repetition_penalty", number_range_check(0.01, 100.0)),
    BodyField("frequency_penalty", number_range_check(-2.0, 2.0)),
    BodyField("presence_penalty", number_range_check(-2.0, 2.0)),
    BodyField("n", integer_range_check(1, _MOST_CHOICES), 1),
    BodyField("seed", integer_range_check(-(2**63), 2**64 - 1)),
    BodyField("stop", _stop_problem),
    BodyField("ignore_eos", boolean_problem, False),
    BodyField("stream", boolean_problem, False),
    BodyField("stream_options", _stream_options_problem),
    BodyField("logit_bias", one_of_check({})),
    BodyField("user", text_problem),
    BodyField("metadata", no_problem),
    BodyField("store", one_of_check(False)),
)
COMPLETION = (
    *_COMMON,
    BodyField("prompt", _prompt_problem, needed=True),
    BodyField("max_tokens", integer_range_check(0), 16),
    BodyField("logprobs", integer_range_check(0, _MOST_TOP)),
    BodyField("echo", boolean_problem, False),
    BodyField("best_of", integer_range_check(1, _MOST_CHOICES)),
    BodyField("suffix", one_of_check("")),
)
CHAT = (
    *_COMMON,
    BodyField("messages", no_problem, needed=True),
    BodyField("max_tokens", integer_range_check(1)),
    BodyField("max_completion_tokens", integer_range_check(1)),
    BodyField("logprobs", boolean_problem, False),
    BodyField("top_logprobs", integer_range_check(0, _MOST_TOP)),
    BodyField("tools", one_of_check([])),
    BodyField("tool_choice", one_of_check("none")),
    BodyField("response_format", one_of_check({"type": "text"})),
    BodyField("modalities", one_of_check(["text"])),
    # How OpenAI's service runs a call, and calls of tools, of which there are none here.
    BodyField("service_tier", one_of_check("auto", "default")),
    BodyField("prompt_cache_key", text_problem),
    BodyField("prompt_cache_retention", text_problem),
    BodyField("safety_identifier", text_problem),
    BodyField("parallel_tool_calls", boolean_problem),
    BodyField("functions", one_of_check([])),
    BodyField("function_call", one_of_check("none")),
    BodyField("reasoning_effort", one_of_check("none")),
    BodyField("verbosity", one_of_check("medium")),
    BodyField("chat_template_kwargs", _object_problem, {}),
    BodyField("add_generation_prompt", boolean_problem),
    BodyField("continue_final_message", boolean_problem, False),
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed request. requests: those of prompt p are [p * n, (p + 1) * n). echo: prompts to return first."""

    fields: dict[str, Any]
    requests: tuple[GenerationRequest, ...]
    chat: bool
    echo: tuple[str, ...] = ()

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are returned."""
        return self.requests[0].logprobs or self.requests[0].prompt_logprobs

    def echoed_prompt(self, place: int) -> str:
        """Return the prompt that a choice's text begins with (echo), or "". place: index of the choice."""
        return self.echo[place // self.fields["n"]] if self.echo else ""


def parse_completion_request(body: bytes, serving: GenerationServing) -> CompletionRequest:
    """Parse a body of /v1/completions. Raises `RequestRefused`."""
    fields = read_body_fields(COMPLETION, body)
    _require_stream_for_options(fields)
    _require_valid_combination(fields)
    prompt = fields["prompt"]
    several = prompt if isinstance(prompt, list) and not is_integer(prompt[0]) else [prompt]
    if len(several) * fields["n"] > serving.limits.prompts:
        raise RequestRefused(
            f"{len(several)} prompts with n={fields['n']} are more than the {serving.limits.prompts} texts of one call"
        )
    ids = [
        tuple(part if isinstance(part, list) else serving.tokenize(part) or [serving.engine.tokenizer.eod])
        for part in several
    ]
    texts = (
        part if isinstance(part, str) else decode_certain(serving.engine.tokenizer, _require_known_ids(part, serving))
        for part in several
    )
    echo = tuple(texts) if fields["echo"] else ()
    scored, top = fields["logprobs"] is not None, fields["logprobs"] or 0
    return CompletionRequest(
        fields, _requests_of(fields, serving, ids, fields["max_tokens"], scored, top), chat=False, echo=echo
    )


def _require_valid_combination(fields: dict[str, Any]) -> None:
    """Raise `RequestRefused` for fields that are valid by themselves and not together."""
    if fields["best_of"] not in (None, fields["n"]):
        raise RequestRefused("best_of must be n: of several texts, all are given")
    scored = fields["logprobs"] is not None
    if fields["max_tokens"] == 0 and not (fields["echo"] and scored):
        raise RequestRefused("max_tokens=0 only scores the prompt; it needs echo and logprobs")
    if fields["echo"] and scored and fields["stream"]:
        raise RequestRefused("echo with logprobs is not streamed; leave one of the three out")


def parse_chat_completion_request(
    body: bytes, serving: GenerationServing, chat: ChatPromptEncoder | None
) -> CompletionRequest:
    """Parse a body of /v1/chat/completions. Raises `RequestRefused`."""
    fields = read_body_fields(CHAT, body)
    _require_stream_for_options(fields)
    if chat is None:
        raise RequestRefused(
            "the tokenizer of this network has no chat template; use /v1/completions, or start the server with --chat-format"
        )
    if fields["top_logprobs"] and not fields["logprobs"]:
        raise RequestRefused("top_logprobs needs logprobs to be true")
    if None not in (fields["max_tokens"], fields["max_completion_tokens"]):
        raise RequestRefused("max_tokens is the old name of max_completion_tokens; give one of them")
    if fields["n"] > serving.limits.prompts:
        raise RequestRefused(f"n={fields['n']} is more than the {serving.limits.prompts} texts of one call")
    messages, files = parse_messages(fields["messages"])
    ending = prompt_ending_of_fields(fields)
    ids, images = chat.encode_with_images(messages, files, serving.engine.image_prompts, serving.limits.images, ending)
    free = serving.engine.max_length - len(ids) + 1  # tokens behind the prompt
    most = min(free, serving.limits.new_tokens or free, serving.defaults.num_tokens or free)
    count = fields["max_completion_tokens"] or fields["max_tokens"] or max(1, most)
    return CompletionRequest(
        fields,
        tuple(
            replace(request, images=images)
            for request in _requests_of(
                fields, serving, [ids], count, fields["logprobs"], fields["top_logprobs"] or 0, chat
            )
        ),
        chat=True,
    )


def _require_stream_for_options(fields: dict[str, Any]) -> None:
    if fields["stream_options"] is not None and not fields["stream"]:
        raise RequestRefused("stream_options needs stream to be true")


def _require_known_ids(ids: Sequence[int], serving: GenerationServing) -> Sequence[int]:
    if not all(0 <= token < serving.engine.model.true_vocab_size for token in ids):
        raise RequestRefused(f"the ids of prompt must be from 0 to {serving.engine.model.true_vocab_size - 1}")
    return ids


def _requests_of(
    fields: dict[str, Any],
    serving: GenerationServing,
    prompts: Sequence[tuple[int, ...]],
    count: int,
    scored: bool,
    top: int,
    chat: ChatPromptEncoder | None = None,
) -> tuple[GenerationRequest, ...]:
    """Return `n` engine requests for each prompt. count: new tokens; top: likeliest tokens to return."""
    sampling = _sampling_of(fields, serving)
    adapter = serving.adapter_named(fields["model"])
    stop = serving.defaults.stop_words if fields["stop"] is None else fields["stop"]
    stop = [stop] if isinstance(stop, str) else stop
    requests = []
    for ids in prompts:
        serving.require_within_limits(_require_known_ids(ids, serving), count)
        for number_of_choice in range(fields["n"]):
            seed = None if fields["seed"] is None else (fields["seed"] + number_of_choice) % 2**63
            requests.append(
                GenerationRequest(
                    ids,
                    count,
                    sampling,
                    seed,
                    stop_ids=chat.stop_ids if chat and not fields["ignore_eos"] else (),
                    stop_words=(*stop, *(chat.stop_words if chat and not fields["ignore_eos"] else ())),
                    ignore_eod=fields["ignore_eos"],
                    logprobs=scored,
                    prompt_logprobs=scored and fields.get("echo", False),
                    top_logprobs=top,
                    adapter=adapter,
                )
            )
    return tuple(requests)


def _sampling_of(fields: Mapping[str, Any], serving: GenerationServing) -> SamplingParams:
    """Return how a request samples: as it says, else as the network's folder says, else with temperature 1 and no limits."""
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, **serving.defaults.sampling}
    values |= {name: fields[name] for name in _SAMPLING if fields[name] is not None}
    # top_p 0 keeps the likeliest token alone; to the engine it means no limit.
    values["temperature"] = round_tiny_temperature_to_zero(values["temperature"]) if values["top_p"] > 0.0 else 0.0
    numbers: dict[str, Any] = {name: value if name == "top_k" else float(value) for name, value in values.items()}
    return SamplingParams(**numbers)


async def completion_response(
    completion: CompletionRequest, call: HTTPCallRequests, serving: GenerationServing
) -> dict[str, Any]:
    """Wait for all replies and return the response body."""
    replies = await call.wait_for_replies()
    # In a thread: other calls are answered while the texts of many tokens are looked up.
    choices = await asyncio.to_thread(_whole_choices, completion, replies, serving)
    kind = "chat.completion" if completion.chat else "text_completion"
    return {
        **_common_response_fields(completion, serving, kind),
        "choices": choices,
        "usage": _usage_fields(completion, replies),
    }


def _whole_choices(
    completion: CompletionRequest, replies: Sequence[GenerationReply], serving: GenerationServing
) -> list[dict[str, Any]]:
    """Return the `choices` of a response from all its replies."""
    choices = []
    for place, reply in enumerate(replies):
        tokens = [*reply.prompt, *reply.tokens] if completion.requests[place].prompt_logprobs else list(reply.tokens)
        spelling = IncrementalTokenTexts(
            serving.engine.tokenizer, () if reply.prompt else completion.requests[place].prompt
        )
        scores = _LogprobFormatter(serving, completion.chat, spelling)
        text = completion.echoed_prompt(place) + reply.text
        message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = scores.format_tokens(tokens) if completion.has_logprobs else None
        choices.append(_choice(place, message if completion.chat else {"text": text}, logprobs, reply.reason))
    return choices


async def completion_events(
    completion: CompletionRequest, call: HTTPCallRequests, serving: GenerationServing
) -> AsyncIterator[str]:
    """Yield the response as server-sent events, the last of which is [DONE]; an error ends them."""
    head = _common_response_fields(
        completion, serving, "chat.completion.chunk" if completion.chat else "text_completion"
    )
    usage = {"usage": None} if (completion.fields["stream_options"] or {}).get("include_usage") else {}
    scores = [
        _LogprobFormatter(serving, completion.chat, IncrementalTokenTexts(serving.engine.tokenizer, request.prompt))
        for request in completion.requests
    ]
    replies: dict[int, GenerationReply] = {}
    try:
        for choice in _stream_opening_choices(completion):
            yield _server_sent_event({**head, "choices": [choice], **usage})
        async for place, event in call.events():
            if event.reply is not None and event.reply.reason == "error":
                yield _server_sent_event(openai_error_body(event.reply.problem, 500))
                return
            if event.reply is not None:
                replies[place] = event.reply
            yield _server_sent_event(
                {**head, "choices": [_delta_choice(completion, place, event, scores[place])], **usage}
            )
        if usage:
            yield _server_sent_event(
                {
                    **head,
                    "choices": [],
                    "usage": _usage_fields(completion, [replies[place] for place in sorted(replies)]),
                }
            )
        yield "data: [DONE]\n\n"
    finally:
        call.cancel_all()


def _stream_opening_choices(completion: CompletionRequest) -> list[dict[str, Any]]:
    """Return the choices of the events before the first token: the role in a chat, else the echoed prompts."""
    places = range(len(completion.requests))
    if completion.chat:
        return [_choice(place, {"delta": {"role": "assistant", "content": ""}}) for place in places]
    echoes = [completion.echoed_prompt(place) for place in places]
    return [_choice(place, {"text": echo}) for place, echo in enumerate(echoes) if echo]


def _delta_choice(
    completion: CompletionRequest, place: int, event: GenerationEvent, scores: _LogprobFormatter
) -> dict[str, Any]:
    """Return the choice of a streamed event: new text, log-probabilities, finish reason."""
    text = {"delta": {"content": event.text} if event.text else {}} if completion.chat else {"text": event.text}
    logprobs = None
    if completion.has_logprobs and (event.tokens or event.reply is not None and scores.is_incomplete):
        logprobs = scores.format_tokens(event.tokens, last=event.reply is not None)
    return _choice(place, text, logprobs, None if event.reply is None else event.reply.reason)


def _choice(
    place: int, text: Mapping[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    """Return one entry of `choices`. text: its text, message or delta."""
    return {"index": place, **text, "logprobs": logprobs, "finish_reason": reason}


class _LogprobFormatter:
    """Formats tokens with log-probabilities, as chat completions or completions have them."""

    def __init__(self, serving: GenerationServing, chat: bool, spelling: IncrementalTokenTexts) -> None:
        self._chat, self._spelling, self._offset = chat, spelling, 0
        self._tokens: list[tuple[TokenLogprob, TokenText]] = []  # that wait for the rest of a character

    @property
    def is_incomplete(self) -> bool:
        """Whether tokens are held back, since the last of them ends in the middle of a character."""
        return bool(self._tokens)

    def format_tokens(self, tokens: Sequence[TokenLogprob], *, last: bool = True) -> dict[str, Any]:
        """Return the `logprobs` field for the next tokens, with those that were held back. last: no more follow."""
        for token in tokens:
            self._tokens.append((token, self._spelling.add(token.id, [number for number, _ in token.top])))
        if last and self._tokens:
            token, written = self._tokens[-1]
            self._tokens[-1] = (token, replace(written, text=written.text + self._spelling.finish()))
        ready = [] if self._spelling.is_incomplete else self._tokens
        self._tokens = self._tokens[len(ready) :]
        return self._chat_field(ready) if self._chat else self._completion_field(ready)

    def _chat_field(self, tokens: Sequence[tuple[TokenLogprob, TokenText]]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **_logprob_entry(written.text, written.content, clamped_logprob(token)),
                    "top_logprobs": [
                        _logprob_entry(name, content, max(score, LEAST_LOGPROB))
                        for (name, content), (_, score) in zip(written.others, token.top, strict=True)
                    ],
                }
                for token, written in tokens
            ],
            "refusal": None,
        }

    def _completion_field(self, tokens: Sequence[tuple[TokenLogprob, TokenText]]) -> dict[str, Any]:
        offsets, top = [], list[dict[str, float] | None]()
        for token, written in tokens:
            offsets.append(self._offset)
            self._offset += len(written.text)
            # The token itself goes by the name that it has in `tokens`, also where the end completed it.
            names = [
                written.text if number == token.id else name
                for (name, _), (number, _) in zip(written.others, token.top, strict=True)
            ]
            scores = [max(score, LEAST_LOGPROB) for _, score in token.top]
            top.append(None if token.logprob is None else dict(zip(names, scores, strict=True)))
        return {
            "tokens": [written.text for _, written in tokens],
            "token_logprobs": [clamped_logprob(token) for token, _ in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _logprob_entry(piece: str, content: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": piece, "logprob": logprob, "bytes": list(content)}


def _common_response_fields(completion: CompletionRequest, serving: GenerationServing, kind: str) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if completion.chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": completion.fields["model"] or serving.model,
    }


def _usage_fields(completion: CompletionRequest, replies: Sequence[GenerationReply]) -> dict[str, Any]:
    """Return the token counts of a response; a prompt counts once for all its choices."""
    prompt = sum(len(request.prompt) for request in completion.requests[:: completion.fields["n"]])
    new = sum(len(reply.tokens) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {
            "cached_tokens": sum(reply.cached_tokens for reply in replies[:: completion.fields["n"]])
        },
    }


def _server_sent_event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def openai_error_body(message: str, status: int) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kinds: dict[int, str] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
