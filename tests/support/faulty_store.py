"""Server of objects on loopback, S3's own requests and answers, that can be told to fail as real stores do.

with FaultyStore() as server:
    server.fail("UploadPart", Fault.SLOW_DOWN, times=2)
"""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "checkpoints"
_MULTIPART = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
_PLAIN = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}


class Fault(Enum):
    """What the server does in the place of its work, or before it."""

    DELAY = "waits, and then does its work"
    HANG = "takes the request, and never answers"
    DROP = "ends the connection without an answer"
    ZEROS = "keeps zeros in the place of what it was sent"
    SLOW_DOWN = "503 SlowDown"
    WRONG_REGION = "301 PermanentRedirect"
    EXPIRED = "400 ExpiredToken"
    FORBIDDEN = "403 AccessDenied"
    NOT_IMPLEMENTED = "501 NotImplemented"


@dataclass
class _Rule:
    operation: str
    fault: Fault
    match: str
    left: float
    seconds: float


@dataclass
class FaultyStore:
    """One server with one empty bucket. A context manager; all that hang are let go at its end."""

    address: str = "127.0.0.1"
    requests: Counter[str] = field(default_factory=Counter)
    """How many of each operation have come."""
    peak: Counter[str] = field(default_factory=Counter)
    """How many of each operation were there at once, at most."""

    def __post_init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each of thousands of requests
        self._rules: list[_Rule] = []
        self._now: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(self.address, 0, self._answer, threaded=True, request_handler=_KeepAlive)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> FaultyStore:
        self._thread.start()
        with socket.create_connection((self.address, self._server.port)) as connection:
            request = (
                f"PUT /{BUCKET} HTTP/1.1\r\nHost: {self.address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            connection.sendall(request.encode())
            assert b"200 OK" in connection.recv(4096)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """By which clients find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self.address}:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "testing-key",
            "AWS_SECRET_ACCESS_KEY": "testing-secret",
            "AWS_REGION": "us-east-1",
        }

    def fail(
        self, operation: str, fault: Fault, *, match: str = "", times: float = float("inf"), seconds: float = 0.0
    ) -> None:
        """From now on, so many requests of an operation, "" for any, whose path or query has a text, meet a fault."""
        with self._lock:
            self._rules.append(_Rule(operation, fault, match, times, seconds))

    def heal(self) -> None:
        """Fail no more; what hangs goes on hanging."""
        with self._lock:
            self._rules.clear()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        operation = _operation(environ)
        with self._lock:
            self.requests[operation] += 1
            self._now[operation] += 1
            self.peak[operation] = max(self.peak[operation], self._now[operation])
            rules = [one for one in self._rules if one.left > 0 and one.operation in ("", operation)]
            asked = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
            rule = next((one for one in rules if re.search(one.match, asked)), None)
            if rule is not None:
                rule.left -= 1
        try:
            return self._fail(rule, environ, start_response) if rule else list(self._app(environ, start_response))
        finally:
            with self._lock:
                self._now[operation] -= 1

    def _fail(self, rule: _Rule, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if rule.fault is Fault.HANG:
            self._over.wait()
        if rule.fault in (Fault.DROP, Fault.HANG):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if rule.fault in (Fault.DELAY, Fault.ZEROS):
            if rule.fault is Fault.DELAY:
                time.sleep(rule.seconds)
            environ["wsgi.input"] = io.BytesIO(content if rule.fault is Fault.DELAY else bytes(len(content)))
            return list(self._app(environ, start_response))
        status, code = rule.fault.value.split()
        body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
        start_response(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


class _KeepAlive(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"


def _operation(environ: dict[str, Any]) -> str:
    """S3's name of a request."""
    method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
    if "/" not in environ["PATH_INFO"].strip("/"):
        return "ListObjects" if method == "GET" else "Bucket"
    if method == "POST" and "uploads" in query:
        return "CreateMultipartUpload"
    if "uploadId=" in query:
        return _MULTIPART.get(method, method)
    if environ.get("HTTP_X_AMZ_COPY_SOURCE"):
        return "CopyObject"
    return _PLAIN.get(method, method)
