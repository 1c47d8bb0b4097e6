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
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from megatron.inference.server import adapters, openai, put_api
from megatron.inference.server.chat import Chat
from megatron.inference.server.fields import Refused
from megatron.inference.server.metrics import CONTENT_TYPE, prometheus_text
from megatron.inference.server.request_handling import (
    BeamSearchPool,
    ClientDisconnected,
    PendingRequests,
    until_disconnected,
)
from megatron.inference.server.serving import Limits, ServedThread, Serving

logger = logging.getLogger(__name__)

_OPEN = ("/", "/health", "/v1/health")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_CLIENT_LEFT = 499  # of no standard, and seen in the metrics only
_MISDIRECTED = 421
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # names of this machine, as they stand in a call

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class RequestFilter:
    """Around the app: checks the host and the token, counts and logs answers. No prompt and no answer is ever logged.

    limits: those of connections are read where they come in.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        token: str,
        hosts: Collection[str],
        answers: Counter[tuple[str, int]],
        limits: Limits,
    ) -> None:
        self.limits = limits
        self._app, self._token, self._hosts, self._answers = app, token, frozenset(hosts), answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def counted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            refused = self._auth_error(scope)
            await (self._app if refused is None else error_answer(scope["path"], refused))(scope, receive, counted)
        finally:
            # Any path may be asked for, and only those that there are get a number of their own.
            path = scope["route"].path if scope.get("route") is not None else "other"
            self._answers[path, status or _CLIENT_LEFT] += 1
            logger.info(
                "%s %s: %d in %.3f s", scope["method"], ascii(scope["path"])[1:-1], status, time.monotonic() - begun
            )

    def _auth_error(self, scope: Scope) -> Refused | None:
        """Why a call is not let in."""
        given = dict(reversed(scope["headers"]))  # the first of each name counts
        host = host_name(given.get(b"host", b""))
        if self._hosts and host not in self._hosts:
            return Refused(
                f"this server is not {host[:100]!r}; it is started with --allowed-hosts NAME to go by other names",
                _MISDIRECTED,
            )
        if not self._token or scope["path"] in _OPEN:
            return None
        if hmac.compare_digest(given.get(b"authorization", b""), b"Bearer " + self._token.encode()):
            return None
        return Refused("a bearer token is needed, and this is not the one", 401, {"WWW-Authenticate": "Bearer"})


def host_name(header: bytes) -> str:
    """The name of a Host header, without its port."""
    return re.sub(r":\d*$", "", header.decode("latin-1").strip().lower()).rstrip(".")


def build_app(
    serving: Serving, *, chat: Chat | None = None, token: str = "", hosts: Collection[str] = ()
) -> RequestFilter:
    """Return the ASGI app.

    chat: makes prompts of conversations; if None, /v1/chat/completions refuses. token: bearer token that calls must show, except
    those of /, /health and /v1/health; empty: none. hosts: names that the Host header of any call may have; empty: any.
    """
    app, answers = new_app(), Counter[tuple[str, int]]()
    add_health(app, serving.service)
    _add_views(app, serving, answers)
    _add_generation(app, serving, chat)
    _add_adapters(app, serving)
    return RequestFilter(app, token, hosts, answers, serving.limits)


def new_app() -> FastAPI:
    """An app without routes, which answers errors as clients read them."""
    # The pages that FastAPI makes of its routes need scripts from elsewhere.
    app = FastAPI(title="Megatron", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return error_answer(request.url.path, error)

    @app.exception_handler(HTTPException)
    async def unserved(request: Request, error: HTTPException) -> Response:
        return error_answer(request.url.path, Refused(str(error.detail), error.status_code, error.headers))

    @app.exception_handler(ClientDisconnected)
    async def gone(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    return app


def add_health(app: FastAPI, service: ServedThread) -> None:
    """Routes that tell whether requests are taken."""

    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> Response:
        if failure := service.failure:
            return json_answer({"status": "failed", "reason": failure}, 503)
        return (
            json_answer({"status": "draining", "reason": service.closing_reason}, 503)
            if service.closing_reason
            else json_answer({"status": "ok"})
        )


def _add_views(app: FastAPI, serving: Serving, answers: Counter[tuple[str, int]]) -> None:
    page = files("megatron.inference.server").joinpath("page.html").read_text(encoding="utf-8")
    begun = int(time.time())

    @app.get("/")
    async def view() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_answer(
            {"object": "list", "data": [_model_entry(serving, begun, name) for name in ("", *serving.adapters)]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_answer(_model_entry(serving, begun, serving.adapter_named(name)))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus_text(serving.service.engine.metrics(), answers), media_type=CONTENT_TYPE)


def _add_generation(app: FastAPI, serving: Serving, chat: Chat | None) -> None:
    searches = BeamSearchPool(serving.service, serving.limits.searches)

    @app.put("/api")
    @app.post("/api")
    async def api(request: Request) -> Response:
        body = await read_body(request, serving.limits)
        return json_answer(await until_disconnected(put_api.generate(body, serving, searches), request.receive))

    async def answer(request: Request, completion: openai.CompletionRequest) -> Response:
        call = PendingRequests(serving.service, completion.requests)
        if completion.is_streaming:
            return EventStream(
                call, with_keepalives(openai.chunks(completion, call, serving), serving.limits.silence_seconds)
            )
        return json_answer(await until_disconnected(openai.whole(completion, call, serving), request.receive))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, serving.limits)
        return await answer(request, await asyncio.to_thread(openai.parse_completion, body, serving))

    @app.post("/v1/chat/completions")
    async def conversations(request: Request) -> Response:
        body = await read_body(request, serving.limits)
        return await answer(request, await asyncio.to_thread(openai.parse_chat_completion, body, serving, chat))


def _add_adapters(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        body = await read_body(request, serving.limits)
        return PlainTextResponse(await asyncio.to_thread(adapters.load, body, serving))

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        body = await read_body(request, serving.limits)
        return PlainTextResponse(await asyncio.to_thread(adapters.unload, body, serving))


class EventStream(StreamingResponse):
    """Server-sent events; a client who leaves, even before the first of them, lets the requests go."""

    def __init__(self, call: PendingRequests, content: AsyncIterator[str]) -> None:
        super().__init__(
            content, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        self._call = call

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()


async def with_keepalives(words: AsyncIterator[str], seconds: float) -> AsyncIterator[str]:
    """The words, and a comment of server-sent events whenever none has come for so long: who stands between may close what is silent."""
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


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request; `Refused` for one that is too large, comes too slowly, or is not said to be JSON; `ClientDisconnected`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused("the header Content-Type must be application/json", 415)
    most, parts = limits.body_bytes, bytearray()

    async def collect() -> None:
        async for part in request.stream():
            parts.extend(part)
            if len(parts) > most:
                raise Refused(
                    f"the body is larger than the {most} bytes that this server takes", 413, {"Connection": "close"}
                )

    try:
        await asyncio.wait_for(collect(), limits.read_seconds)
    except asyncio.TimeoutError:
        raise Refused(f"the body did not come within {limits.read_seconds} s", 408, {"Connection": "close"}) from None
    except ClientDisconnect:  # starlette's
        raise ClientDisconnected from None
    return bytes(parts)


def json_answer(content: dict[str, Any], status: int = 200) -> Response:
    """Written in ASCII, so that halves of surrogate pairs, which clients may send, can be sent back."""
    return Response(json.dumps(content), status, media_type="application/json")


def error_answer(path: str, error: Refused) -> Response:
    """An error as the clients of a path read it."""
    body = {"message": str(error)} if path == "/api" else openai.error_body(str(error), error.status)
    return Response(json.dumps(body), error.status, error.headers, "application/json")


def _model_entry(serving: Serving, begun: int, adapter: str) -> dict[str, Any]:
    """What is told of the network, or of an adapter beside it."""
    parent: dict[str, Any] = {"parent": serving.model} if adapter else {}
    if serving.service.engine.image_prompts is not None:
        parent["input_modalities"] = ["text", "image"]
    return {
        **parent,
        "id": adapter or serving.model,
        "object": "model",
        "created": begun,
        "owned_by": "megatron",
        "max_model_len": serving.max_length,
    }
