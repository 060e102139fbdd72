"""``remesh dashboard``: a page that shows what a job is doing, or did."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import click

from remesh.cli.events_folder import check_folder, title_of
from remesh.cli.shown import say
from remesh.dashboard.serve import make_app, make_server, new_token
from remesh.elasticity.store.endpoint import is_loopback
from remesh.elasticity.telemetry.events import EventReader
from remesh.foundation.errors import ConfigError

DEFAULT_PORT = 8265


@click.command()
@click.argument("events_dir", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the token that browsers must send; created if missing. Required unless --host is loopback.",
)
@click.option(
    "--name", multiple=True, help="A host name, in addition to the address, by which browsers may reach this page."
)
def dashboard(events_dir: Path, host: str, port: int, token_file: Path | None, name: tuple[str, ...]) -> None:
    """Serve a page about the job that writes its events into EVENTS_DIR (remesh run --events-dir).

    It works while the job runs and after it has ended. Press Ctrl-C to stop the server.
    """
    check_folder(events_dir)
    if token_file is None and not is_loopback(host):
        raise ConfigError(
            f"serving the dashboard on {host}: beyond loopback it needs a token, and --token-file was not given; "
            "give one, "
            "or listen on 127.0.0.1 and reach it through ssh -L"
        )
    token = None if token_file is None else read_token(token_file)
    known_by = ["localhost", "127.0.0.1", "[::1]", *name] if is_loopback(host) else ["*"]
    app = make_app(EventReader(events_dir).poll, title_of(events_dir), known_by, token)
    with listen(host, port) as listener:
        shown = host if ":" not in host else f"[{host}]"
        url = f"http://{shown}:{listener.getsockname()[1]}/"
        say(url + (f"?token=$(cat {token_file})" if token_file else ""))
        make_server(app, host, port).run([listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; ConfigError when this machine has no such address, or the port is taken."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"serving the dashboard on {host} port {port}: {error}; give another --port (0 takes a free one) or --host"
        ) from error


def read_token(path: Path) -> str:
    """The token in a file; a new one, readable by its owner alone, if there is no such file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token = path.read_text().strip()
        if len(token) < 16:
            raise ConfigError(
                f"reading the dashboard's token: {path} holds {len(token)} characters, expected at least 16; remove "
                "it to have one made"
            ) from None
        return token
    except OSError as error:
        raise ConfigError(f"making the dashboard's token: {path} cannot be written ({error}); give another") from error
    token = new_token()
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token
