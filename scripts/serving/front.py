"""The HTTP surface in front of an engine: keys, limits, checks and errors of OpenAI's form. Answers pass untouched."""

import asyncio
import contextlib
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from scripts.serving.engines import Engine
from scripts.serving.requests import (
    ChatRequest,
    CompletionRequest,
    RequestProblem,
    check,
    for_transformers,
    safe_chat,
    safe_completion,
)

ENGINE_PATHS = {ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}
DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True)
class FrontOptions:
    """What the front lets pass.

    Attributes:
        name: the model's name for clients.
        api_key: what clients must send as bearer token; None: nothing.
        slots: answers at the same time; a request with n counts as n.
        max_request_bytes: largest body of a request.
        sampling: values for what a request leaves out, such as temperature.
        broken: makes text harmless, see `control_text_breaker`.
        context: tokens of prompt and answer together.
    """

    name: str
    api_key: str | None
    slots: int
    max_request_bytes: int
    sampling: dict[str, Any]
    broken: Callable[[str], str]
    context: int


def build_front(engine: Engine, options: FrontOptions) -> FastAPI:
    """The application: /health, /v1/models, /v1/chat/completions, /v1/completions."""
    client = httpx2.AsyncClient(
        base_url=engine.url,
        headers={"Authorization": f"Bearer {engine.key}"},
        timeout=httpx2.Timeout(10, read=None, pool=None),
        # llama.cpp closes a connection behind a stream without saying so: a second request on it may find nobody.
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,  # a proxy must not come between
    )
    desk = _Desk(engine, options, client)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    created = int(time.time())
    entry = {"id": options.name, "object": "model", "created": created, "owned_by": "minimind-pipeline"}
    entry["max_model_len"] = options.context

    @app.get("/health")
    async def health() -> JSONResponse:
        return await desk.health()

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        desk.check_key(request)
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        desk.check_key(request)
        desk.check_model(name)
        return entry

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await desk.answer(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await desk.answer(request, CompletionRequest)

    @app.exception_handler(RequestProblem)
    async def refuse(_: Request, problem: RequestProblem) -> JSONResponse:
        headers = {"Retry-After": "1"} if problem.status == 429 else None
        return JSONResponse(problem.body(), problem.status, headers)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> JSONResponse:
        problem = RequestProblem(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(problem.body(), error.status_code)

    return app


class _Desk:
    """Takes requests in, as many at a time as there are slots, and passes them to the engine."""

    def __init__(self, engine: Engine, options: FrontOptions, client: httpx2.AsyncClient) -> None:
        self.engine, self.options, self.client = engine, options, client
        self.in_use = 0

    async def health(self) -> JSONResponse:
        """Whether the engine answers."""
        try:
            ready = (await self.client.get("/health", timeout=5)).status_code == 200
        except httpx2.HTTPError:
            ready = False
        return JSONResponse({"status": "ok" if ready else "engine is not ready"}, 200 if ready else 503)

    def check_key(self, request: Request) -> None:
        """Raise RequestProblem 401 without the right bearer token."""
        if self.options.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(key.encode(), self.options.api_key.encode()):
            raise RequestProblem(401, "wrong or missing API key: send it as `Authorization: Bearer KEY`")

    def check_model(self, name: str | None) -> None:
        """Raise RequestProblem 404 for a model that is not served; no name means the one that is."""
        if name not in (None, self.options.name):
            message = f"model {name!r} is not served here, only {self.options.name!r}"
            raise RequestProblem(404, message, field="model")

    async def answer(self, request: Request, shape: type) -> Response:
        """Check, rewrite, and pass on one request; the answer streams if it was asked to."""
        self.check_key(request)
        body = check(await self._json(request), shape)
        self.check_model(body.get("model"))
        count = body.get("n", 1)
        if shape is CompletionRequest and isinstance(body["prompt"], list) and not _are_ids(body["prompt"]):
            count *= max(len(body["prompt"]), 1)
        if count > self.options.slots:
            raise RequestProblem(400, f"{count} answers at once: at most {self.options.slots} are served", field="n")
        if self.in_use + count > self.options.slots:
            message = f"all {self.options.slots} slots are busy; try again"
            raise RequestProblem(429, message, kind="rate_limit_error")
        safe = safe_chat(body, self.options.broken) if shape is ChatRequest else safe_completion(body)
        self.in_use += count
        try:
            response = await self._ask(ENGINE_PATHS[shape], self._for_engine(safe), request)
        except BaseException:
            self._release(count)
            raise
        if body.get("stream"):
            return _Relay(response, lambda: self._release(count))
        try:
            return await self._whole(response, request)
        finally:
            self._release(count)

    def _release(self, count: int) -> None:
        self.in_use -= count

    async def _json(self, request: Request) -> Any:
        """The body, read no further than it may be long."""
        most, body = self.options.max_request_bytes, bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise RequestProblem(413, f"the request is longer than {most:,} bytes")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestProblem(400, f"the body is not JSON: {error}") from None

    def _for_engine(self, body: dict[str, Any]) -> dict[str, Any]:
        result = self.engine.defaults | self.options.sampling | body
        if self.engine.kind == "transformers":
            result = for_transformers(result)
        return result | self.engine.fields | {"model": self.engine.model}

    async def _ask(self, path: str, body: dict[str, Any], request: Request) -> httpx2.Response:
        """The engine's response once it has begun. Closing it, or the client's leaving, ends the generation."""
        asked = self.client.build_request("POST", path, json=body)
        response = await _unless_left(self.client.send(asked, stream=True), request)
        if response.status_code != 200:
            try:
                content = await response.aread()
            finally:
                await response.aclose()
            raise _engine_problem(response.status_code, content)
        return response

    async def _whole(self, response: httpx2.Response, request: Request) -> Response:
        try:
            content = await _unless_left(response.aread(), request)
        finally:
            await response.aclose()
        return Response(content, media_type="application/json")


class _Relay(StreamingResponse):
    """The engine's stream, passed on as it comes; its end, or the client's leaving, frees what it took."""

    def __init__(self, response: httpx2.Response, at_end: Callable[[], None]) -> None:
        super().__init__(self._chunks(response), media_type="text/event-stream")
        self._response, self._at_end = response, at_end

    async def _chunks(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        last = b""
        try:
            async for chunk in response.aiter_raw():
                last = (last + chunk)[-len(DONE) :]
                yield chunk
            if last.strip() != DONE.strip():  # `transformers serve` leaves it out
                yield DONE
        except httpx2.HTTPError as error:
            problem = RequestProblem(502, f"the engine broke off: {error}", kind="server_error")
            yield f"data: {json.dumps(problem.body())}\n\n".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:  # also before the first chunk
            self._at_end()
            with contextlib.suppress(httpx2.HTTPError):
                await asyncio.shield(self._response.aclose())


async def _unless_left(work: Any, request: Request) -> Any:
    """What `work` gives, unless the client leaves first; then `work` is cancelled.

    Raises RequestProblem when the engine cannot be reached; nobody reads what is answered to a client that left.
    """
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_leaving(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestProblem(499, "the client left")
        return task.result()
    except httpx2.HTTPError as error:
        raise RequestProblem(502, f"the engine does not answer: {error}", kind="server_error") from None
    finally:
        for running in (task, left):
            running.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _wait_for_leaving(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


def _are_ids(prompt: list) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _engine_problem(status: int, content: bytes) -> RequestProblem:
    """The engine's error in OpenAI's form; one that is not about the request is 502."""
    try:
        error = json.loads(content)["error"]
        message = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        message = content[:500].decode("utf-8", "replace") or f"status {status}"
    if 400 <= status < 500:
        return RequestProblem(status, message)
    return RequestProblem(502, f"the engine failed: {message}", kind="server_error")


@contextlib.contextmanager
def front_in_a_thread(engine: Engine, options: FrontOptions) -> Iterator[str]:
    """Serve on a free port of the loopback; gives the base URL for clients, with /v1."""
    config = uvicorn.Config(build_front(engine, options), host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the front did not start")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(10)
