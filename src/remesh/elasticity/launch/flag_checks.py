"""Checks of the values of ``remesh run``'s flags, before anything starts, for both modes."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remesh.elasticity.launch.flags import REAL, WHOLE, Flag
from remesh.elasticity.store.endpoint import join_endpoint
from remesh.foundation.errors import ConfigError

_FROM_ONE = ("monitor_interval", "join_timeout", "leave_timeout", "hang_timeout")
"""Flags where 0 would mean never, or at once, which no user means."""
_MAX_PORT = 65535
_NUMERIC_KEYS = ("timeout", "interval", "attempt")
_LOOK_UP_POLL_S = 0.5


def check_numbers(values: Mapping[str, Any], flags: Iterable[Flag]) -> None:
    """Counts and seconds are not negative, ports are ports."""
    for flag in flags:
        value = values[flag.dest]
        if flag.kind not in (WHOLE, REAL) or value is None:
            continue
        if flag.dest.endswith("_port") and value > _MAX_PORT:
            raise ConfigError(f"reading --{flag.name} {value}: expected a port, 0 to {_MAX_PORT}")
        if not value >= 0 or (flag.dest in _FROM_ONE and value == 0):
            raise ConfigError(
                f"reading --{flag.name} {value:g}: expected {'more than 0' if flag.dest in _FROM_ONE else '0 or more'}"
            )
    if 0 < values["exclude_slower"] <= 1:
        raise ConfigError(
            f"reading --exclude-slower {values['exclude_slower']:g}: expected more than 1, for it is a factor over the "
            "others' median, or 0 for never; for example 1.5"
        )


def check_endpoints(text: str, flag: str = "--rdzv-endpoint") -> None:
    """HOST[:PORT], or several with commas."""
    for endpoint in split_endpoints(text):
        host, port = _parts_of(endpoint)
        if port is not None and not (port.isdecimal() and int(port) <= _MAX_PORT):
            raise ConfigError(f"reading {flag} {endpoint!r}: found port {port!r}, expected 0 to {_MAX_PORT}")
        if not re.fullmatch(r"[\w.:%-]+", host):
            raise ConfigError(f"reading {flag} {endpoint!r}: found host {host!r}, expected a name or an address")


def split_endpoints(text: str) -> list[str]:
    """Each endpoint of a list with commas."""
    return [one.strip() for one in text.split(",") if one.strip()]


def with_port(endpoint: str, port: int) -> str:
    """An endpoint with this port where it names none.

    >>> with_port("head", 29400), with_port("::1", 29400), with_port("[::1]:7", 29400)
    ('head:29400', '[::1]:29400', '[::1]:7')
    """
    host, given = _parts_of(endpoint)
    return join_endpoint(host, int(given or port))


def _parts_of(endpoint: str) -> tuple[str, str | None]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]") or (":" in host and not host.endswith("]")):
        return endpoint.strip("[]"), None  # the colons are those of an IPv6 address
    return host.strip("[]"), port


def wait_for_names(endpoints: Sequence[str], patience_s: float, tell: Callable[[str], object]) -> None:
    """Return once this machine can look up one of the hosts; ConfigError if it cannot for ``patience_s``.

    The name of a pod may be known a little after others look for it.
    """
    is_reported = not endpoints
    deadline_s = time.monotonic() + patience_s
    while endpoints:
        errors = []
        for endpoint in endpoints:
            try:
                socket.getaddrinfo(_parts_of(endpoint)[0], None)
                return
            except OSError as error:
                errors.append(f"{endpoint!r}: {error.strerror or error}")
        if time.monotonic() >= deadline_s:
            raise ConfigError(
                f"joining the other nodes: this machine could not look up the host of {', '.join(errors)}, for "
                f"{patience_s:g} s; correct --rdzv-endpoint (or --master-addr), or give an address"
            )
        if not is_reported:
            is_reported = True
            tell(f"cannot look up the host of {', '.join(errors)}; trying again for {patience_s:g} s")
        time.sleep(min(_LOOK_UP_POLL_S, max(0.0, deadline_s - time.monotonic())))


def unquoted(text: str) -> str:
    """Text without the quotes around it that a shell did not take away, as torchrun's own examples have them.

    >>> unquoted("'join_timeout=5,last_call_timeout=1'")
    'join_timeout=5,last_call_timeout=1'
    """
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def check_conf(text: str) -> None:
    """``--rdzv-conf``: timeouts, intervals and counts are numbers."""
    for part in filter(None, (one.strip() for one in unquoted(text).split(","))):
        key, _, value = part.partition("=")
        if key.strip().endswith(_NUMERIC_KEYS) and not re.fullmatch(r"\s*\d+(\.\d*)?\s*", value):
            raise ConfigError(f"reading --rdzv-conf {text!r}: found {part!r}, expected a number of 0 or more")


def check_signals(names: str) -> None:
    """Names of signals, with commas."""
    for name in filter(None, (one.strip() for one in names.split(","))):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ConfigError(
                f"reading --signals-to-handle {names!r}: found {name!r}, expected names of signals that a process can "
                "handle, as SIGTERM,SIGINT"
            )


def check_script(script: str, values: Mapping[str, Any]) -> None:
    """What is to be run is there: a program on the path, a module, a file, or a folder with ``__main__.py``."""
    if values["no_python"] and values["module"]:
        raise ConfigError("reading the flags: --module names Python code, and --no-python excludes it; give one")
    if values["no_python"] and not values["run_path"]:
        if shutil.which(script) is None:
            raise ConfigError(
                f"starting workers: {script!r} is not a program on the PATH; give the path of an executable file"
            )
    elif not values["module"] and find_main(script) is None:
        found = "a folder without __main__.py" if Path(script).is_dir() else "nothing there"
        raise ConfigError(
            f"starting workers: script {script!r} does not exist, found {found}; give a path to a Python file, or -m "
            "MODULE"
        )


def find_main(script: str) -> Path | None:
    """The file that ``python script`` runs; None if there is none. An archive with ``__main__.py`` is itself."""
    path = Path(script)
    if path.is_dir():
        path /= "__main__.py"
    return path if path.exists() and not path.is_dir() else None


def check_writable(folder: Path, flag: str) -> None:
    """A folder for logs can be made and written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"preparing logs: {flag} {folder} cannot be written ({error}); give a folder that this user can write"
        ) from error
