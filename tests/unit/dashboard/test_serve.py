"""The page is served whole, follows the job, and lets in whom it should: a real server on loopback."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from click.testing import CliRunner

from remesh.cli.dashboard import dashboard, read_token
from remesh.cli.top import top
from remesh.dashboard.serve import make_app, make_server
from remesh.foundation.errors import ConfigError

TOKEN = "a-token-that-nobody-guesses"
WAIT_S = 20.0

Event = dict[str, Any]


@contextmanager
def serving(poll: Callable[[], list[Event]], token: str | None = None) -> Iterator[str]:
    """A server of its own, and where it is."""
    server = make_server(make_app(poll, "a job", ["127.0.0.1"], token), "127.0.0.1", 0)
    bound = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=run, args=(server, bound))
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        bound.close()
        assert not thread.is_alive()


def run(server: uvicorn.Server, bound: socket.socket) -> None:
    server.run(sockets=[bound])


def feed(*batches: list[Event]) -> Callable[[], list[Event]]:
    """Hands out one batch after the other."""
    left = list(batches)
    return lambda: left.pop(0) if left else []


def finish(text: str) -> list[Event]:
    return [{"t": 1.0, "who": "agent-0", "kind": "finish", "ok": True, "text": text}]


def test_the_page_needs_nothing_from_anywhere_else() -> None:
    with serving(feed()) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        page, script, style = (client.get(path) for path in ("/", "/page.js", "/page.css"))
    assert [each.status_code for each in (page, script, style)] == [200, 200, 200]
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for text in (page.text, script.text.replace("http://www.w3.org/2000/svg", ""), style.text):
        assert "http://" not in text and "https://" not in text
    assert "innerHTML" not in script.text


def test_a_stream_brings_the_view_and_brings_it_again_when_it_changes() -> None:
    waiting, told = threading.Event(), []

    def poll() -> list[Event]:
        return finish("done") if waiting.is_set() and not told.append(1) and len(told) == 1 else []  # type: ignore[func-returns-value]

    with serving(poll) as url, httpx.stream("GET", f"{url}/events", timeout=WAIT_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        views = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
        assert next(views)["state"] == "waiting"
        waiting.set()
        assert next(views)["told"] == "done"


def test_without_the_token_nothing_is_told_and_with_it_the_address_is_cleaned() -> None:
    with serving(feed(), TOKEN) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for path in ("/", "/view", "/events", "/?token=wrong", "/view?token="):
            assert client.get(path).status_code == 401
        assert client.get("/view", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        first = client.get(f"/?token={TOKEN}")
        assert (first.status_code, first.headers["location"]) == (303, "/")
        assert "HttpOnly" in first.headers["set-cookie"] and "SameSite=strict" in first.headers["set-cookie"]
        assert client.get("/view").status_code == 200


def test_another_name_for_this_machine_is_refused() -> None:
    with serving(feed()) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        assert client.get("/view", headers={"Host": "evil.example"}).status_code == 400


def test_garbage_and_half_open_connections_do_no_harm() -> None:
    chance = random.Random(3)
    with serving(feed(finish("done"))) as url:
        port = int(url.rpartition(":")[2])
        open_ones = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(20)]
        for number, connection in enumerate(open_ones):
            if number % 3 == 0:
                connection.sendall(chance.randbytes(chance.randint(1, 4000)))
            elif number % 3 == 1:
                connection.sendall(b"GET /view HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 40_000)
        assert httpx.get(f"{url}/view", timeout=WAIT_S).json()["title"] == "a job"
        for connection in open_ones:
            connection.close()


def test_beyond_loopback_a_token_is_needed(tmp_path: Path) -> None:
    result = CliRunner().invoke(dashboard, [str(tmp_path), "--host", "0.0.0.0"])
    assert isinstance(result.exception, ConfigError)
    assert "--token-file" in str(result.exception)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(dashboard, [str(tmp_path), "--port", str(port)])
    assert isinstance(result.exception, ConfigError)
    assert f"port {port}" in str(result.exception) and "http://" not in result.output


def test_a_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_token(path)
    assert len(token) >= 24 and read_token(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="holds 5 characters"):
        read_token(path)


def test_top_shows_a_finished_job_once(tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in (*finish("all workers ended well"),)]
    (tmp_path / "agent-0.jsonl").write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(top, [str(tmp_path), "--once"])
    assert result.exit_code == 0, result.output
    assert "ended" in result.output and "all workers ended well" in result.output


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    for verb in (dashboard, top):
        result = CliRunner().invoke(verb, [str(tmp_path / "gone")])
        assert isinstance(result.exception, ConfigError)
        assert "gone" in str(result.exception)
