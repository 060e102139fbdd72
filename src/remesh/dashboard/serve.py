"""Web server of the dashboard, a small ASGI application: the page, the view as JSON, and a stream of updates.

One task reads new events twice a second and folds them into the story. Browsers listen to ``/events``, a stream of
server-sent events: each is the whole view, which is bounded, so that a browser may come and go as it likes. The page
loads nothing from anywhere else.

Guards. Requests whose ``Host`` is not a name that this server is known by are refused, or a web page elsewhere could
read through a browser on this machine. With a token, every request must bring it: in the ``Authorization`` header, or
once as ``?token=``, which is turned into a cookie and taken out of the address. Connections and streams are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from remesh.dashboard.story import Event, Story

Poll = Callable[[], Sequence[Event]]
"""Returns the events that are new since the last call."""

_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_COOKIE = "remesh_token"
_POLL_S = 0.5
_KEEP_ALIVE_S = 15.0
"""A stream without news sends a line this often; a client that is gone is noticed then."""
_MAX_STREAMS = 32
_MAX_CONNECTIONS = 128
_MAX_HEAD_BYTES = 16 << 10
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class LiveStory:
    """The story of one job, and the connections that wait for news of it."""

    def __init__(self, poll: Poll, title: str) -> None:
        self._poll = poll
        self._title = title
        self._story = Story()
        self._changed = asyncio.Condition()
        self._version = 0
        self.num_streams = 0
        self.view = self._render()
        """The newest view, as JSON text."""

    def _render(self) -> str:
        view = _finite({"title": self._title, **self._story.to_json()})
        return json.dumps(view, separators=(",", ":"), allow_nan=False)

    async def follow(self) -> None:
        """Read and fold, for ever."""
        while True:
            events = await asyncio.to_thread(self._poll)
            if events:
                for event in events:
                    self._story.take(event)
                self.view = self._render()
                async with self._changed:
                    self._version += 1
                    self._changed.notify_all()
            await asyncio.sleep(_POLL_S)

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events, each the whole view: the newest one now, and again whenever it has changed."""
        self.num_streams += 1
        try:
            while True:
                seen = self._version
                yield f"data: {self.view}\n\n"
                while seen == self._version:
                    if not await self._wait():
                        yield ": nothing new\n\n"
        finally:
            self.num_streams -= 1

    async def _wait(self) -> bool:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), _KEEP_ALIVE_S)
            except TimeoutError:
                return False
        return True


class TokenGuard:
    """Lets requests through that bring the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        brought = request.query_params.get("token", "")
        if self._fits(brought):
            response: Response = RedirectResponse(request.url.path, 303)
            response.set_cookie(_COOKIE, brought, httponly=True, samesite="strict")
            await response(scope, receive, send)
            return
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(bearer) or self._fits(request.cookies.get(_COOKIE, "")):
            await self._app(scope, receive, send)
            return
        response = PlainTextResponse("This dashboard asks for its token: open it as /?token=...\n", 401)
        await response(scope, receive, send)

    def _fits(self, brought: str) -> bool:
        return hmac.compare_digest(brought.encode(), self._token)


def make_app(poll: Poll, title: str, hosts: Sequence[str], token: str | None = None) -> Starlette:
    """The application; ``hosts`` are the names by which it may be addressed (``*`` for any)."""

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        app.state.board = board = LiveStory(poll, title)
        following = asyncio.create_task(board.follow())
        try:
            yield
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    def file(request: Request) -> Response:
        name, media_type = _FILES[request.url.path]
        return Response((_PAGE / name).read_bytes(), media_type=media_type, headers=_HEADERS)

    def view(request: Request) -> Response:
        return Response(request.app.state.board.view, media_type="application/json", headers=_HEADERS)

    def events(request: Request) -> Response:
        board: LiveStory = request.app.state.board
        if board.num_streams >= _MAX_STREAMS:
            return JSONResponse({"error": f"{_MAX_STREAMS} pages are open already"}, 503, headers=_HEADERS)
        return StreamingResponse(board.stream(), media_type="text/event-stream", headers=_HEADERS)

    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)]
    if token is not None:
        guards.append(Middleware(TokenGuard, token=token))
    routes = [*(Route(path, file) for path in _FILES), Route("/view", view), Route("/events", events)]
    return Starlette(routes=routes, middleware=guards, lifespan=life)


def make_server(app: Starlette, host: str, port: int) -> uvicorn.Server:
    """A server for the application; ``run()`` it, and set ``should_exit`` to end it."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        http="h11",
        ws="none",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )
    return uvicorn.Server(config)


def new_token() -> str:
    """A random token, too long to be guessed."""
    return secrets.token_urlsafe(24)


def _finite(value: Any) -> Any:
    """The same without infinities and NaN, which are no JSON: a browser refuses a text with one of them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
