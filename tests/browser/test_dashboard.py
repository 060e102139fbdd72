"""The dashboard in a real browser: what a person sees while a job loses a worker and goes on."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remesh.dashboard.serve import make_app, make_server
from remesh.elasticity.telemetry.events import EventReader

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser installs it")
pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_S = 30.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs chromium, not on the path")
    with playwright.sync_playwright() as engine:
        chromium = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A dashboard of an empty folder: its address, and the log to write to."""
    server = make_server(make_app(EventReader(tmp_path).poll, "a job", ["127.0.0.1"]), "127.0.0.1", 0)
    bound = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}", tmp_path / "agent-0.jsonl"
    server.should_exit = True
    thread.join(WAIT_S)
    bound.close()


def say(log: Path, kind: str, **values: Any) -> None:
    with log.open("a") as file:
        file.write(json.dumps({"t": time.time(), "who": "agent-0", "kind": kind, **values}) + "\n")


def generation(log: Path, number: int, pids: list[int], step: int, reason: str) -> None:
    members = [{"rank": rank, "node": rank // 2, "slot": rank % 2, "pid": pid} for rank, pid in enumerate(pids)]
    axes = {"dp": len(pids) // 2, "tp": 2}
    hosts = {"0": "node-a", "1": "node-b"}
    say(log, "generation", number=number, axes=axes, members=members, hosts=hosts, step=step, reason=reason)
    for rank in range(len(pids)):
        givers = [[0, 3 << 20]] if number > 1 and rank == len(pids) - 1 else []
        taken = {"bytes_by_giver": givers, "bytes_taken": sum(count for _, count in givers)}
        told = {"source": "peers", "reason": "every shard is held by a living rank", "seconds": 0.1}
        say(log, "filled", generation=number, rank=rank, bytes_from_disk=0, **taken, **told)


def test_a_person_sees_a_worker_die_and_the_job_go_on(browser: Any, served: tuple[str, Path]) -> None:
    url, log = served
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    expect = playwright.expect
    expect(page.locator("#state")).to_have_text("waiting", timeout=WAIT_S * 1000)
    for rank, pid in enumerate((10, 11, 12, 13)):
        say(log, "worker-started", who=f"agent-{rank // 2}", slot=rank % 2, pid=pid)
    generation(log, 1, [10, 11, 12, 13], 0, "4 workers fit dp=2 x tp=2")
    for step in range(1, 9):
        say(log, "step", generation=1, rank=0, step=step, loss=5.0 - step / 4)
    expect(page.locator("#mesh")).to_have_text("dp=2 x tp=2", timeout=WAIT_S * 1000)
    expect(page.locator(".worker.training")).to_have_count(4, timeout=WAIT_S * 1000)
    expect(page.locator("figure")).to_have_count(2)
    say(log, "worker-exited", who="agent-1", slot=1, code=-9)
    expect(page.locator(".worker.gone")).to_contain_text("rank 3", timeout=WAIT_S * 1000)
    generation(log, 2, [10, 11], 8, "node-b is dead; 2 workers fit dp=1 x tp=2")
    expect(page.locator("#told")).to_contain_text("node-b is dead", timeout=WAIT_S * 1000)
    expect(page.locator("#moves .gift")).to_have_count(1)
    expect(page.locator("#move-text")).to_contain_text("3.0 MiB between ranks")
    assert errors == []


def test_what_a_program_logs_is_shown_as_text_and_never_run(browser: Any, served: tuple[str, Path]) -> None:
    url, log = served
    page = browser.new_page()
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    say(log, "note", text="<img src=x onerror=alert(1)><script>alert(2)</script>")
    page.goto(url)
    playwright.expect(page.locator("#happenings")).to_contain_text(re.compile("<img src=x"), timeout=WAIT_S * 1000)
    assert page.locator("#happenings img, #happenings script").count() == 0
    assert dialogs == []


def test_the_page_fits_a_telephone(browser: Any, served: tuple[str, Path]) -> None:
    url, log = served
    page = browser.new_page(viewport={"width": 390, "height": 800})
    generation(log, 1, [10, 11, 12, 13], 0, "4 workers fit")
    page.goto(url)
    playwright.expect(page.locator(".worker")).to_have_count(4, timeout=WAIT_S * 1000)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
