"""PUT /api: the contract of Megatron's text generation server.

    {"prompts": ["Hello"], "tokens_to_generate": 8}  ->  {"text": ["Hello there ..."], "segments": [["Hello", " there", ...]],
                                                          "logprobs": null, "reasons": ["length"]}

Its fields, limits and messages. Other than there: what is wrong is always answered with a 4xx; top_p may be the integer 1; what
ends a text is not part of it; `stop_token` is the tokenizer's end of document unless it is given; and `reasons` says why each
text ended. Of several prompts, the n-th draws with random_seed + n.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.inference.beam import BeamFailed, beam_search
from megatron.inference.detokenizer import IncrementalTokenTexts
from megatron.inference.generate import decode_following
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.inference.server.body_fields import (
    BodyField,
    RequestRefused,
    boolean_problem,
    integer_range_check,
    number_range_check,
    raise_problems,
    read_body_fields,
)
from megatron.inference.server.request_handling import BeamSearchThreadPool, HTTPCallRequests
from megatron.inference.server.serving import GenerationServing, clamped_logprob, round_tiny_temperature_to_zero

_WIDEST = 64
_SWITCHES = ("add_BOS", "stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon", "no_log")
_RETIRED = {
    "sentences": "sentences is no longer used.  Replace with prompts",
    "max_len": "max_len is no longer used.  Replace with tokens_to_generate",
}


def _prompts_problem(value: Any) -> str:
    if not isinstance(value, list) or not all(isinstance(prompt, str) for prompt in value):
        return "is not a list of strings"
    return "" if value else "is empty"


FIELDS = (
    BodyField("prompts", _prompts_problem, needed=True),
    BodyField("tokens_to_generate", integer_range_check(0, rule="must be an integer greater than or equal to 0"), 64),
    BodyField("logprobs", boolean_problem, False),
    BodyField(
        "temperature",
        number_range_check(0.0, 100.0, above=True, rule="must be a positive number less than or equal to 100.0"),
        1.0,
    ),
    BodyField(
        "top_k",
        integer_range_check(
            0, 1000, rule="must be an integer equal to or greater than 0 and less than or equal to 1000"
        ),
        0,
    ),
    BodyField("top_p", number_range_check(0.0, 1.0, rule="must be a positive float less than or equal to 1.0"), 0.0),
    BodyField(
        "top_p_decay", number_range_check(0.0, 1.0, rule="must be a positive float less than or equal to 1.0"), 0.0
    ),
    BodyField(
        "top_p_bound",
        number_range_check(0.0, 1.0, above=True, rule="must be a positive float less than or equal to top_p"),
        0.0,
    ),
    *(BodyField(name, boolean_problem, False) for name in _SWITCHES),
    BodyField("random_seed", integer_range_check(0, rule="must be a positive integer")),
    BodyField("beam_width", integer_range_check(1, _WIDEST, rule=f"must be an integer from 1 to {_WIDEST}")),
    BodyField("stop_token", integer_range_check(0, rule="must be an integer, an id of the vocabulary")),
    BodyField("length_penalty", number_range_check(-10.0, 10.0, rule="must be a float from -10 to 10"), 1.0),
)


def _request_field_conflicts(fields: dict[str, Any], serving: GenerationServing) -> list[str]:
    """Return what is wrong between fields that are valid by themselves."""
    width, most = fields["beam_width"], serving.limits.prompts
    return [
        problem
        for broken, problem in (
            (len(fields["prompts"]) > most, f"Maximum number of prompts is {most}"),
            (not all(fields["prompts"]) and not fields["add_BOS"], "Empty prompts require add_BOS=true"),
            (
                fields["tokens_to_generate"] == 0 and not fields["logprobs"],
                "tokens_to_generate=0 implies logprobs should be True",
            ),
            (fields["top_k"] > 0 and fields["top_p"] > 0.0, "cannot set both top-k and top-p samplings."),
            (fields["top_p_decay"] > 0.0 and fields["top_p"] == 0.0, "top_p_decay cannot be set without top_p"),
            (fields["top_p_bound"] > 0.0 and fields["top_p"] == 0.0, "top_p_bound cannot be set without top_p"),
            (
                fields["top_p_bound"] > fields["top_p"] > 0.0,
                "top_p_bound must be a positive float less than or equal to top_p",
            ),
            (width is not None and len(fields["prompts"]) > 1, "When doing beam_search, batch size must be 1"),
            (width is not None and fields["tokens_to_generate"] == 0, "beam_width needs tokens_to_generate above 0"),
            (
                width is not None and 2 * width > serving.engine.model.true_vocab_size,
                f"beam_width must be at most half of the {serving.engine.model.true_vocab_size} ids",
            ),
            (
                fields["stop_token"] is not None and fields["stop_token"] >= serving.engine.model.true_vocab_size,
                f"stop_token must be below {serving.engine.model.true_vocab_size}",
            ),
        )
        if broken
    ]


def parse_put_body(body: bytes, serving: GenerationServing) -> tuple[dict[str, Any], list[GenerationRequest]]:
    """Return the fields of a body and its engine requests; `RequestRefused` lists all that is wrong."""
    fields = read_body_fields(FIELDS, body, _RETIRED)
    raise_problems(_request_field_conflicts(fields, serving))
    tokenizer, count = serving.engine.tokenizer, fields["tokens_to_generate"]
    begin = [] if not fields["add_BOS"] else [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
    sampling = SamplingParams(
        round_tiny_temperature_to_zero(fields["temperature"]),
        fields["top_k"],
        float(fields["top_p"]),
        top_p_decay=float(fields["top_p_decay"]),
        top_p_bound=float(fields["top_p_bound"]),
    )
    stops = ["\n"] * fields["stop_on_eol"] + ["\n\n"] * fields["stop_on_double_eol"]
    requests = []
    for place, prompt in enumerate(fields["prompts"]):
        ids = begin + serving.tokenize(prompt)
        if not ids:
            raise RequestRefused("a prompt has no tokens; give some text, or add_BOS=true")
        serving.require_within_limits(ids, count)
        requests.append(
            GenerationRequest(
                tuple(ids),
                count,
                sampling,
                None if fields["random_seed"] is None else fields["random_seed"] + place,
                stop_ids=() if fields["stop_token"] is None else (fields["stop_token"],),
                ignore_eod=fields["stop_token"] is not None,
                stop_words=tuple(stops),
                keep_stop=True,
                newline_after_colon=not fields["prevent_newline_after_colon"],
                logprobs=fields["logprobs"],
                prompt_logprobs=fields["logprobs"],
            )
        )
    return fields, requests


async def answer_generation(body: bytes, serving: GenerationServing, searches: BeamSearchThreadPool) -> dict[str, Any]:
    """Run the generation or beam search that a body asks for, and return the response body."""
    fields, requests = await asyncio.to_thread(parse_put_body, body, serving)
    if fields["beam_width"] is not None:
        search = partial(
            beam_search,
            prompt=requests[0].prompt,
            width=fields["beam_width"],
            num_tokens=requests[0].num_tokens,
            ends=requests[0].stop_ids or (serving.engine.tokenizer.eod, *serving.engine.tokenizer.end_ids),
            length_penalty=float(fields["length_penalty"]),
        )
        try:
            beams = await searches.run_search(search)
        except BeamFailed as error:
            raise RequestRefused(str(error), 503) from error
        return {
            "text": [
                fields["prompts"][0] + decode_following(serving.engine.tokenizer, requests[0].prompt, beam.ids)
                for beam in beams
            ],
            "segments": [_token_texts(serving, requests[0], beam.ids) for beam in beams],
            "scores": [beam.score for beam in beams],
        }
    replies = await HTTPCallRequests(serving.service, requests).wait_for_replies()
    return {
        "text": [prompt + reply.text for prompt, reply in zip(fields["prompts"], replies, strict=True)],
        "segments": [_token_texts(serving, *pair) for pair in zip(requests, [reply.ids for reply in replies])],
        # The first token follows nothing.
        "logprobs": [[clamped_logprob(token) for token in (*reply.prompt[1:], *reply.tokens)] for reply in replies]
        if fields["logprobs"]
        else None,
        "reasons": [reply.reason for reply in replies],
    }


def _token_texts(serving: GenerationServing, request: GenerationRequest, ids: Sequence[int]) -> list[str]:
    """Return the text of each token of prompt and continuation."""
    return IncrementalTokenTexts(serving.engine.tokenizer).texts_of_next_ids([*request.prompt, *ids], last=True)
