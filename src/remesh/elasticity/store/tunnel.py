"""TLS tunnels for the store's traffic, since torch's store speaks no TLS.

    worker ─┐                                                   ┌─> the store, on loopback
            ├─> way, on loopback ══ TLS, both certificates ══> port
    agent  ─┘   (of their agent)                                (of the agent that serves)

A *port* is the public port of the server side; a *way* is a loopback port of the client side, for one endpoint
elsewhere. Neither looks at the payload. When one side of a connection ends, the other is ended: a lost host shows as it
does without encryption. A peer that shows no certificate of the authority within a few seconds is dropped. The side
that refuses records why, and a client that is dropped without a reason records that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from remesh.elasticity.store.endpoint import split_endpoint
from remesh.foundation.settings import timeout_s
from remesh.foundation.threads import make_thread
from remesh.wire.tls import Tls

HANDSHAKE_TIMEOUT_S = timeout_s(5.0)
"""How long a handshake may take, and a connection to a peer."""
MAX_HANDSHAKES = 64
"""Callers that have not shown a certificate yet; more are dropped until some have."""
CHUNK_BYTES = 1 << 16
LINGER_GRACE_S = 5.0
"""How long what was written may take to go out after the other side has ended."""
_MAX_NOTES = 100
# In TLS 1.3 a caller does not learn whether its certificate was taken: asyncio does not send the alert for that.
_NO_REASON = ConnectionError("the peer closed the connection without an error; it may have refused this certificate")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A connection that did not come about."""

    doing: str
    reason: str


@dataclass(frozen=True, slots=True)
class _TunnelStream:
    """The two directions of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Tunnels:
    """The tunnel ends of one agent, carried by one thread. A context manager."""

    def __init__(self, tls: Tls) -> None:
        self._server_context = tls.context(is_server=True)
        self._client_context = tls.context(is_server=False)
        self._loop = asyncio.new_event_loop()
        self._thread = make_thread("tunnels", self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._transports: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()
        self._listeners: list[socket.socket] = []
        self._callers: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._ways: dict[str, str] = {}
        self._notes: deque[Refusal] = deque(maxlen=_MAX_NOTES)
        self._last_noted_s: dict[Refusal, float] = {}
        self._num_handshakes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open_port(self, listener: socket.socket, port: int) -> None:
        """Forward clients of ``listener`` that show a certificate to this port of loopback."""
        self._call(self._listen(listener, self._serve_port, port))

    def way_to(self, endpoint: str) -> str:
        """An endpoint on loopback that leads to another node's port; the same for each call."""
        with self._lock:
            if endpoint not in self._ways:
                listener = socket.create_server(("127.0.0.1", 0))
                self._call(self._listen(listener, self._serve_way, endpoint))
                self._ways[endpoint] = f"127.0.0.1:{listener.getsockname()[1]}"
            return self._ways[endpoint]

    def take_notes(self) -> list[Refusal]:
        """Connections that were refused here or elsewhere since the last call."""
        notes = []
        with contextlib.suppress(IndexError):
            while True:
                notes.append(self._notes.popleft())
        return notes

    # --- inside the thread ---

    def _call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self, listener: socket.socket, serve: Any, where: Any) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._look_for_callers(listener, serve, where)

    def _look_for_callers(self, listener: socket.socket, serve: Any, where: Any) -> None:
        if listener.fileno() != -1:
            self._loop.add_reader(listener, self._accept, listener, serve, where)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, listener: socket.socket, serve: Any, where: Any) -> None:
        # Not by a task: one that is cancelled loses a caller that has just been accepted, and its socket stays open.
        try:
            caller, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the caller is gone again
        except OSError:
            # There are no descriptors left: look again in a moment.
            self._loop.remove_reader(listener)
            self._loop.call_later(0.05, self._look_for_callers, listener, serve, where)
            return
        caller.setblocking(False)
        self._callers.add(caller)
        self._spawn(serve(caller, where))

    async def _serve_port(self, caller: socket.socket, port: int) -> None:
        if self._num_handshakes >= MAX_HANDSHAKES:
            caller.close()
            return
        self._num_handshakes += 1
        doing = "letting a node in"
        try:
            doing = f"letting {caller.getpeername()[0]} in"
            outside = await self._wrap(caller, self._server_context)
        except OSError as error:
            caller.close()
            self._note(doing, error)
            return
        finally:
            self._num_handshakes -= 1
        try:
            inside = self._keep(_TunnelStream(*await asyncio.open_connection("127.0.0.1", port)))
            await self._carry(outside, inside)
        except OSError:
            # This agent ends, and its store with it.
            return
        finally:
            self._end(outside)

    async def _wrap(self, caller: socket.socket, context: ssl.SSLContext | None) -> _TunnelStream:
        """A connection that was accepted, after its handshake if it has one."""
        reader = asyncio.StreamReader(loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        limit_s = None if context is None else HANDSHAKE_TIMEOUT_S
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, caller, ssl=context, ssl_handshake_timeout=limit_s
        )
        return self._keep(_TunnelStream(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)))

    def _keep(self, stream: _TunnelStream) -> _TunnelStream:
        self._transports.add(stream.writer.transport)
        return stream

    async def _serve_way(self, caller: socket.socket, endpoint: str) -> None:
        inside = await self._wrap(caller, None)
        host, port = split_endpoint(endpoint)
        doing = f"reaching the store at {endpoint}"
        try:
            # Names in certificates are not compared.
            connecting = asyncio.open_connection(host, port, ssl=self._client_context, server_hostname="")
            outside = self._keep(_TunnelStream(*await asyncio.wait_for(connecting, HANDSHAKE_TIMEOUT_S)))
            if not await self._carry(inside, outside):
                self._note(doing, _NO_REASON)
        except OSError as error:
            self._note(doing, error)
        finally:
            self._end(inside)

    def _note(self, doing: str, error: OSError) -> None:
        """Each refusal once in a while, however often it is repeated; a caller that only looked is none."""
        if error is not _NO_REASON and isinstance(error, (ConnectionError, ssl.SSLEOFError)):
            return
        note = Refusal(doing, str(error) or f"no TLS handshake within {HANDSHAKE_TIMEOUT_S:g} s")
        now_s = time.monotonic()
        if now_s - self._last_noted_s.get(note, -60.0) >= 60.0:
            if len(self._last_noted_s) >= _MAX_NOTES:
                self._last_noted_s.clear()
            self._last_noted_s[note] = now_s
            self._notes.append(note)

    async def _carry(self, one: _TunnelStream, other: _TunnelStream) -> bool:
        """Forward bytes until either side ends, then end both. Returns whether ``other`` sent anything."""
        has_said = asyncio.Event()
        pumps = [self._loop.create_task(_pump(one, other)), self._loop.create_task(_pump(other, one, has_said))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._end(one)
            self._end(other)
        return has_said.is_set()

    def _end(self, stream: _TunnelStream) -> None:
        """What is written still goes out, for a while: the store answers not every request."""
        # asyncio's encrypted transports cannot be aborted any more when they are closed twice.
        if not stream.writer.is_closing():
            stream.writer.close()
            self._loop.call_later(LINGER_GRACE_S, stream.writer.transport.abort)

    async def _close(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in list(self._transports):
            transport.abort()
        # Transports end in the loop's next rounds, an encrypted one after the one below it.
        for _ in range(4):
            await asyncio.sleep(0)
        # A task that was cancelled before it began has closed nothing.
        for caller in list(self._callers):
            caller.close()


async def _pump(giver: _TunnelStream, taker: _TunnelStream, has_said: asyncio.Event | None = None) -> None:
    while data := await giver.reader.read(CHUNK_BYTES):
        if has_said is not None:
            has_said.set()
        taker.writer.write(data)
        await taker.writer.drain()
