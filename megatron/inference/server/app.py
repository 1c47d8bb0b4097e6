"""The routes, who may use them, and errors as answers.

    /                      the page                 everyone
    /health                200, or 503 and why      everyone: ok, draining, failed
    PUT /api               Megatron's               with the token, if there is one
    POST /v1/completions   OpenAI's                 "
    POST /v1/chat/completions                       "
    GET /v1/models, /metrics                        "
    POST /pooling, /v1/score                "         of a server with a reward model, which has these alone (scoring.py)
    POST /v1/load_lora_adapter, /v1/unload_...      ", and with --allow-runtime-lora-updating

A body must say that it is JSON: a page of another site can then not send one without the browser asking first. And a call must
name a host that is ours, if those are known: a page of another site whose name was turned to this machine (DNS rebinding) does not.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.inference.server import openai, put_api
from megatron.inference.server.body_fields import BodyField, RequestRefused, read_body_fields, text_problem
from megatron.inference.server.chat import ChatPromptEncoder
from megatron.inference.server.metrics import CONTENT_TYPE, prometheus_text
from megatron.inference.server.request_handling import (
    BeamSearchThreadPool,
    ClientDisconnected,
    HTTPCallRequests,
    refusal_for_error,
    until_disconnected,
)
from megatron.inference.server.serving import GenerationServing, RequestLimits
from megatron.inference.service_thread import ServiceStoppedError, ServiceThread

logger = logging.getLogger(__name__)

_OPEN = ("/", "/health", "/v1/health")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_CLIENT_LEFT = 499  # of no standard, and seen in the metrics only
_MISDIRECTED = 421
_LOAD = (BodyField("lora_name", text_problem, needed=True), BodyField("lora_path", text_problem, needed=True))
_UNLOAD = (BodyField("lora_name", text_problem, needed=True),)
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # names of this machine, as they stand in a call

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class RequestFilter:
    """ASGI middleware: checks host and bearer token, counts and logs responses. No prompt and no generated text is
    logged. limits: read by connections.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        token: str,
        hosts: Collection[str],
        answers: Counter[tuple[str, int]],
        limits: RequestLimits,
    ) -> None:
        self.limits = limits
        self._app, self._token, self._hosts, self._answers = app, token, frozenset(hosts), answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def send_and_note_status(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            refused = self._access_refusal(scope)
            await (self._app if refused is None else error_answer(scope["path"], refused))(
                scope, receive, send_and_note_status
            )
        finally:
            # Any path may be asked for, and only those that there are get a number of their own.
            path = scope["route"].path if scope.get("route") is not None else "other"
            self._answers[path, status or _CLIENT_LEFT] += 1
            logger.info(
                "%s %s: %d in %.3f s", scope["method"], ascii(scope["path"])[1:-1], status, time.monotonic() - begun
            )

    def _access_refusal(self, scope: Scope) -> RequestRefused | None:
        """Return the refusal (421 for a host that is not allowed, 401 for a wrong bearer token) of a request, or None."""
        given = dict(reversed(scope["headers"]))  # the first of each name counts
        host = host_without_port(given.get(b"host", b""))
        if self._hosts and host not in self._hosts:
            return RequestRefused(
                f"this server is not {host[:100]!r}; it is started with --allowed-hosts NAME to go by other names",
                _MISDIRECTED,
            )
        if not self._token or scope["path"] in _OPEN:
            return None
        if hmac.compare_digest(given.get(b"authorization", b""), b"Bearer " + self._token.encode()):
            return None
        return RequestRefused("a bearer token is needed, and this is not the one", 401, {"WWW-Authenticate": "Bearer"})


def host_without_port(header: bytes) -> str:
    """Return the host of a Host header, lower case, without its port."""
    return re.sub(r":\d*$", "", header.decode("latin-1").strip().lower()).rstrip(".")


def build_app(
    serving: GenerationServing, *, chat: ChatPromptEncoder | None = None, token: str = "", hosts: Collection[str] = ()
) -> RequestFilter:
    """Return the ASGI app of the generation server. chat: makes prompts of conversations; if None, /v1/chat/completions
    refuses. token: bearer token that requests must have, except those of /, /health and /v1/health; empty: none. hosts:
    values that the Host header may have; empty: any.
    """
    app, answers = new_fastapi_app(), Counter[tuple[str, int]]()
    add_health_routes(app, serving.service)
    _add_info_routes(app, serving, answers)
    _add_generation_routes(app, serving, chat)
    _add_adapter_routes(app, serving)
    return RequestFilter(app, token, hosts, answers, serving.limits)


def new_fastapi_app() -> FastAPI:
    """Return an app without routes that answers errors in its clients' formats."""
    # The pages that FastAPI makes of its routes need scripts from elsewhere.
    app = FastAPI(title="Megatron", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestRefused)
    async def answer_refusal(request: Request, error: RequestRefused) -> Response:
        return error_answer(request.url.path, error)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        return error_answer(request.url.path, RequestRefused(str(error.detail), error.status_code, error.headers))

    @app.exception_handler(ClientDisconnected)
    async def answer_disconnected(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    return app


def add_health_routes(app: FastAPI, service: ServiceThread) -> None:
    """Add routes that say whether requests are accepted."""

    @app.get("/health")
    @app.get("/v1/health")
    async def answer_health() -> Response:
        if failure := service.failure_reason:
            return json_answer({"status": "failed", "reason": failure}, 503)
        if service.closing_reason:
            return json_answer({"status": "draining", "reason": service.closing_reason}, 503)
        return json_answer({"status": "ok"})


def _add_info_routes(app: FastAPI, serving: GenerationServing, answers: Counter[tuple[str, int]]) -> None:
    """Add the page, the list of models and the metrics."""
    page = files("megatron.inference.server").joinpath("page.html").read_text(encoding="utf-8")
    begun = int(time.time())

    @app.get("/")
    async def answer_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    @app.get("/v1/models")
    async def answer_models() -> Response:
        return json_answer(
            {
                "object": "list",
                "data": [_model_entry(serving, begun, name) for name in ("", *serving.engine.adapters.names)],
            }
        )

    @app.get("/v1/models/{name:path}")
    async def answer_model_info(name: str) -> Response:
        return json_answer(_model_entry(serving, begun, serving.adapter_named(name)))

    @app.get("/metrics")
    async def answer_prometheus_metrics() -> Response:
        return Response(prometheus_text(serving.engine.metrics(), answers), media_type=CONTENT_TYPE)


def _add_generation_routes(app: FastAPI, serving: GenerationServing, chat: ChatPromptEncoder | None) -> None:
    searches = BeamSearchThreadPool(serving.service, serving.limits.searches)

    @app.put("/api")
    @app.post("/api")
    async def answer_put_api(request: Request) -> Response:
        body = await read_body(request, serving.limits)
        return json_answer(
            await until_disconnected(put_api.answer_generation(body, serving, searches), request.receive)
        )

    async def answer_completion(
        request: Request, parse: Callable[[bytes, GenerationServing], openai.CompletionRequest]
    ) -> Response:
        completion = await asyncio.to_thread(parse, await read_body(request, serving.limits), serving)
        call = HTTPCallRequests(serving.service, completion.requests)
        if completion.fields["stream"]:
            return EventStream(
                call,
                with_keepalives(openai.completion_events(completion, call, serving), serving.limits.silence_seconds),
            )
        return json_answer(
            await until_disconnected(openai.completion_response(completion, call, serving), request.receive)
        )

    @app.post("/v1/completions")
    async def answer_completions(request: Request) -> Response:
        return await answer_completion(request, openai.parse_completion_request)

    @app.post("/v1/chat/completions")
    async def answer_chat_completions(request: Request) -> Response:
        return await answer_completion(request, partial(openai.parse_chat_completion_request, chat=chat))


def _add_adapter_routes(app: FastAPI, serving: GenerationServing) -> None:
    """Add vLLM's routes by which clients load and unload adapters, a folder of the server's machine.

    Every caller may have any folder read there, so they refuse unless the server is started with
    --allow-runtime-lora-updating.
    """

    async def answer_change(request: Request, change: Callable[[bytes, GenerationServing], str]) -> Response:
        body = await read_body(request, serving.limits)
        return PlainTextResponse(await asyncio.to_thread(change, body, serving))

    @app.post("/v1/load_lora_adapter")
    async def answer_load_adapter(request: Request) -> Response:
        return await answer_change(request, _load_adapter)

    @app.post("/v1/unload_lora_adapter")
    async def answer_unload_adapter(request: Request) -> Response:
        return await answer_change(request, _unload_adapter)


def _load_adapter(body: bytes, serving: GenerationServing) -> str:
    """Load an adapter as a request body says; return the response text. Raises `RequestRefused` if it cannot be served."""
    _require_lora_updating_allowed(serving)
    fields = read_body_fields(_LOAD, body)
    try:
        serving.load_adapter(fields["lora_name"], fields["lora_path"])
    except CheckpointError as error:
        # names in a folder may hold half a surrogate pair, which no answer can
        summary, *problems = str(error).encode("utf-8", "backslashreplace").decode().splitlines() or [""]
        raise RequestRefused(
            ": ".join([summary, "; ".join(map(str.strip, problems))]) if problems else summary
        ) from error
    except (ConfigError, ServiceStoppedError) as error:
        raise refusal_for_error(error) from error
    return f"Success: LoRA adapter '{fields['lora_name']}' added successfully."


def _unload_adapter(body: bytes, serving: GenerationServing) -> str:
    """Unload the adapter that a request body names; return the response text. Raises `RequestRefused` if it is not loaded."""
    _require_lora_updating_allowed(serving)
    name = read_body_fields(_UNLOAD, body)["lora_name"]
    if name not in serving.engine.adapters.names:
        here = ", ".join(serving.engine.adapters.names) or "none"
        raise RequestRefused(f"there is no adapter {name[:100]!r} here; this server has {here}", 404)
    try:
        serving.service.run_between_steps(lambda: serving.engine.adapters.unload(name))
    except (ConfigError, ServiceStoppedError) as error:
        raise refusal_for_error(error) from error
    return f"Success: LoRA adapter '{name}' removed successfully."


def _require_lora_updating_allowed(serving: GenerationServing) -> None:
    """Raise `RequestRefused` (403) unless the server allows adapters to be changed."""
    if not serving.updates_adapters:
        raise RequestRefused(
            "adapters are not changed while this server runs; start it with --allow-runtime-lora-updating", 403
        )


class EventStream(StreamingResponse):
    """Server-sent events; if the client disconnects, even before the first, its requests are cancelled."""

    def __init__(self, call: HTTPCallRequests, content: AsyncIterator[str]) -> None:
        super().__init__(
            content, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        self._call = call

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel_all()


async def with_keepalives(words: AsyncIterator[str], seconds: float) -> AsyncIterator[str]:
    """Yield the events, and an SSE comment after so many seconds without, lest proxies close the connection."""
    coming = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(words))
            while not (await asyncio.wait((coming,), timeout=seconds))[0]:
                yield ": not yet\n\n"
            try:
                word = coming.result()
            except StopAsyncIteration:
                return
            yield word
    finally:
        if coming is not None and coming.cancel():
            await asyncio.wait((coming,))


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """Return a body. `RequestRefused` if it is too large, too slow or not declared JSON; `ClientDisconnected`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRefused("the header Content-Type must be application/json", 415)
    most, parts = limits.body_bytes, bytearray()

    async def collect_body() -> None:
        async for part in request.stream():
            parts.extend(part)
            if len(parts) > most:
                raise RequestRefused(
                    f"the body is larger than the {most} bytes that this server takes", 413, {"Connection": "close"}
                )

    try:
        await asyncio.wait_for(collect_body(), limits.read_seconds)
    except asyncio.TimeoutError:
        raise RequestRefused(
            f"the body did not come within {limits.read_seconds} s", 408, {"Connection": "close"}
        ) from None
    except ClientDisconnect:  # starlette's
        raise ClientDisconnected from None
    return bytes(parts)


def json_answer(content: dict[str, Any], status: int = 200) -> Response:
    """Return a JSON response in ASCII, so that lone surrogates, which clients may send, can be sent back."""
    return Response(json.dumps(content), status, media_type="application/json")


def error_answer(path: str, error: RequestRefused) -> Response:
    """Return an error in the format of the clients of a path: OpenAI's, or Megatron's for /api."""
    body = {"message": str(error)} if path == "/api" else openai.openai_error_body(str(error), error.status)
    return Response(json.dumps(body), error.status, error.headers, "application/json")


def _model_entry(serving: GenerationServing, begun: int, adapter: str) -> dict[str, Any]:
    """Return the /v1/models entry of the network, or of an adapter. begun: its creation time, seconds since the epoch."""
    parent: dict[str, Any] = {"parent": serving.model} if adapter else {}
    if serving.engine.image_prompts is not None:
        parent["input_modalities"] = ["text", "image"]
    return {
        **parent,
        "id": adapter or serving.model,
        "object": "model",
        "created": begun,
        "owned_by": "megatron",
        "max_model_len": serving.engine.max_length,
    }
