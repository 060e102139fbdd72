"""The pictures of the documentation, from a run of the demo: ``make pictures``.

The loss curve is the demo's own; its report and the dashboard are photographed in Chromium, light and dark.
"""

import argparse
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from remesh.dashboard.serve import make_app, make_server
from remesh.elasticity.telemetry.events import EventReader

DOCS = Path(__file__).resolve().parents[2] / "docs" / "pictures"
SCHEMES = ("light", "dark")
DRAWN_MS = 1500
WIDTH, MARGIN = 1280, 8
LAST_WHOLE = """height => Math.max(...Array.from(
  document.querySelectorAll(".card, section"), card => card.getBoundingClientRect().bottom
).filter(bottom => bottom < height))"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="what the demo has left")
    folder = parser.parse_args().folder.resolve()
    shutil.copyfile(folder / "loss.svg", DOCS / "loss.svg")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as engine, serve(folder / "main" / "events") as dashboard:
        browser = engine.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        photograph(browser, (folder / "report.html").as_uri(), "report", height=1200)
        photograph(browser, dashboard, "dashboard", height=1000)
        browser.close()


def photograph(browser: Browser, url: str, name: str, *, height: int) -> None:
    """The top of a page, down to the last card that is whole, as two files of `DOCS`."""
    for scheme in SCHEMES:
        page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
        page.goto(url)
        page.wait_for_timeout(DRAWN_MS)
        whole = {"x": 0, "y": 0, "width": WIDTH, "height": page.evaluate(LAST_WHOLE, height) + MARGIN}
        page.screenshot(path=DOCS / f"{name}-{scheme}.png", clip=whole)
        page.close()


@contextmanager
def serve(events: Path) -> Iterator[str]:
    """The dashboard of a job that has ended: its address."""
    server = make_server(make_app(EventReader(events).poll, "the demo", ["127.0.0.1"]), "127.0.0.1", 0)
    bound = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


if __name__ == "__main__":
    main()
