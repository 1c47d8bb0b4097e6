"""/pooling and /v1/score of a server with a reward model, as vLLM has them: a number for each text or conversation.

    /pooling              {"messages": [...]} or {"input": text or texts}    ->  data: [{"index": 0, "data": [1.25]}]
    /v1/score, /score     {"text_1": prompt or prompts, "text_2": answer or answers}  ->  data: [{"index": 0, "score": 1.25}]

Scores are as the network gives them; with "use_activation" their sigmoid. A prompt and its answer are written as a conversation
where the server knows how (--chat-format), else one behind the other.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.inference.requests import EngineBusyError, Ids
from megatron.inference.score_service import ScoreService
from megatron.inference.server.app import RequestFilter, add_health_routes, json_answer, new_fastapi_app, read_body
from megatron.inference.server.body_fields import (
    BodyField,
    RequestRefused,
    boolean_problem,
    no_problem,
    one_of_check,
    read_body_fields,
    text_problem,
)
from megatron.inference.server.chat import parse_messages
from megatron.inference.server.metrics import CONTENT_TYPE, prometheus_text
from megatron.inference.server.request_handling import refusal_for_error, until_disconnected
from megatron.inference.server.serving import RequestLimits
from megatron.inference.service_thread import ServiceStoppedError

Message = Mapping[str, Any]


def _texts_problem(value: Any) -> str:
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list) and bool(texts) and all(isinstance(one, str) for one in texts)
    return "" if good else "must be a string, or a list of strings"


_COMMON = (
    BodyField("model", text_problem),
    BodyField("use_activation", boolean_problem, False),
    BodyField("user", text_problem),
)
POOLING = (
    *_COMMON,
    BodyField("input", _texts_problem),
    BodyField("messages", no_problem),
    BodyField("encoding_format", one_of_check("float"), "float"),
)
SCORE = (*_COMMON, BodyField("text_1", _texts_problem, needed=True), BodyField("text_2", _texts_problem, needed=True))


@dataclass(frozen=True, slots=True)
class ScoringServing:
    """What the scoring routes need. service: the reward model in its thread. model: the name that clients see. ids:
    encodes a text or a conversation as in training; raises `DataError`, `ConfigError` or `ValueError`. positions: the
    longest input. writes_chat: whether conversations are accepted.
    """

    service: ScoreService
    model: str
    ids: Callable[[str | Sequence[Message]], Ids]
    positions: int
    writes_chat: bool
    limits: RequestLimits = field(default_factory=RequestLimits)

    def encode_texts(self, texts: Sequence[str | Sequence[Message]]) -> list[Ids]:
        """Return the ids of each text or conversation; `RequestRefused` if one cannot be encoded or exceeds the limits."""
        if len(texts) > self.limits.prompts:
            raise RequestRefused(
                f"{len(texts)} texts are asked for; this server takes {self.limits.prompts} in a call", 413
            )
        try:
            inputs = [self.ids(one) for one in texts]
        except (DataError, ConfigError, ValueError) as error:
            raise RequestRefused(f"a text cannot be read: {error}") from None
        longest = max(map(len, inputs))
        if self.limits.prompt_tokens is not None and longest > self.limits.prompt_tokens:
            raise RequestRefused(f"a text has {longest} tokens; this server takes {self.limits.prompt_tokens}", 413)
        if longest > self.positions:
            raise RequestRefused(
                f"a text of {longest} tokens is more than the {self.positions} positions of the network; shorten it"
            )
        return inputs


def parse_pooling_request(body: bytes, serving: ScoringServing) -> tuple[list[Ids], bool]:
    """Parse a body of /pooling: (ids of each text, whether to apply the sigmoid to scores). Raises `RequestRefused`."""
    fields = read_body_fields(POOLING, body)
    _require_served_model(fields["model"], serving)
    if (fields["input"] is None) == (fields["messages"] is None):
        raise RequestRefused("give either input, which is text, or messages, a conversation")
    texts: list[Any] = [fields["input"]] if isinstance(fields["input"], str) else fields["input"]
    if fields["messages"] is not None:
        if not serving.writes_chat:
            raise RequestRefused("the tokenizer has no chat template; start the server with --chat-format")
        messages, files = parse_messages(fields["messages"])
        if files:
            raise RequestRefused("the network reads no images; send text alone")
        texts = [messages]
    return serving.encode_texts(texts), fields["use_activation"]


def parse_score_request(body: bytes, serving: ScoringServing) -> tuple[list[Ids], bool]:
    """Parse a body of /v1/score, as `parse_pooling_request`: a prompt for all answers, or one for each."""
    fields = read_body_fields(SCORE, body)
    _require_served_model(fields["model"], serving)
    prompts, answers = ([value] if isinstance(value, str) else value for value in (fields["text_1"], fields["text_2"]))
    if len(prompts) == 1:
        prompts = prompts * len(answers)
    if len(prompts) != len(answers):
        raise RequestRefused(
            f"text_1 has {len(prompts)} texts and text_2 has {len(answers)}; give one for all, or as many"
        )
    pairs = list(zip(prompts, answers, strict=True))
    if not serving.writes_chat:
        return serving.encode_texts([prompt + answer for prompt, answer in pairs]), fields["use_activation"]
    talks = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}] for prompt, answer in pairs
    ]
    return serving.encode_texts(talks), fields["use_activation"]


def build_scoring_app(serving: ScoringServing, *, token: str = "", hosts: Collection[str] = ()) -> RequestFilter:
    """Return the ASGI app of a reward model. token, hosts: see `build_app`."""
    app, answers, begun = new_fastapi_app(), Counter[tuple[str, int]](), int(time.time())
    add_health_routes(app, serving.service)

    @app.get("/v1/models")
    async def answer_models() -> Response:
        entry = {"id": serving.model, "object": "model", "created": begun, "owned_by": "megatron"}
        return json_answer({"object": "list", "data": [{**entry, "max_model_len": serving.positions}]})

    @app.get("/metrics")
    async def answer_prometheus_metrics() -> Response:
        return Response(prometheus_text(serving.service.metrics(), answers), media_type=CONTENT_TYPE)

    _add_scoring_routes(app, serving)
    return RequestFilter(app, token, hosts, answers, serving.limits)


def _add_scoring_routes(app: FastAPI, serving: ScoringServing) -> None:
    async def respond_with_scores(
        request: Request, kind: str, asks: Callable[[bytes, ScoringServing], tuple[list[Ids], bool]]
    ) -> Response:
        inputs, activates = await asyncio.to_thread(asks, await read_body(request, serving.limits), serving)
        try:
            scores = serving.service.submit(inputs)
            values = await until_disconnected(asyncio.wrap_future(scores), request.receive)
        except (EngineBusyError, ServiceStoppedError) as error:
            raise refusal_for_error(error) from error
        if not all(map(math.isfinite, values)):
            raise RequestRefused("the network gives no number for a text", 500)
        values = [0.5 + 0.5 * math.tanh(value / 2) if activates else value for value in values]
        count = sum(map(len, inputs))
        return json_answer(
            {
                "id": f"{kind}-{secrets.token_hex(12)}",
                "object": "list",
                "created": int(time.time()),
                "model": serving.model,
                "data": [
                    {"index": place, "object": kind, **({"score": value} if kind == "score" else {"data": [value]})}
                    for place, value in enumerate(values)
                ],
                "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
            }
        )

    @app.post("/pooling")
    async def answer_pooling(request: Request) -> Response:
        return await respond_with_scores(request, "pooling", parse_pooling_request)

    @app.post("/v1/score")
    @app.post("/score")
    async def answer_score_request(request: Request) -> Response:
        return await respond_with_scores(request, "score", parse_score_request)


def _require_served_model(model: str | None, serving: ScoringServing) -> None:
    """Raise `RequestRefused` (404) if a request names another model."""
    if model not in (None, serving.model):
        raise RequestRefused(f"there is no model {str(model)[:100]!r} here; this server has {serving.model!r}", 404)
