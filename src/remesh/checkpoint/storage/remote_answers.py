"""Wait for one answer of a remote store: bounded, told in the log, tried again where the client does not.

A store may take a connection and never answer. So each call of a client is made by a thread, and waited for no longer
than `STORE_TIMEOUT_S`: a step of a save or load that goes on moves a part of a file in each call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from remesh.checkpoint.checkpoint_errors import StoreFailedError
from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import STORE_TIMEOUT_S
from remesh.foundation.threads import make_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_POLL_S = 0.2
"""Doubled after each attempt: with five, three seconds of pauses in all."""
_SILENT_S = 30.0
"""After so long without an answer a warning is logged."""


class NoAnswerError(TimeoutError):
    """A store has not answered for as long as it may; another attempt would wait as long."""


_KNOWN = (FileNotFoundError, NotADirectoryError, PermissionError, FileExistsError, NotImplementedError, ConfigError)
"""Errors that callers tell apart."""
_DEFINITE = (*_KNOWN, NoAnswerError, IsADirectoryError, ValueError, TypeError, ImportError)
"""Errors that another attempt does not change."""


def ask_store(doing: str, act: Callable[[], T], num_attempts: int = 1) -> T:
    """What ``act`` returns, after so many attempts as it takes.

    ``doing`` names the file, its bytes, and what is waited for. Raises `StoreFailedError`, or an `OSError` whose type
    says that something is not there, is there, or is not allowed.
    """
    pause_s = FIRST_POLL_S
    for attempt in range(1, num_attempts + 1):
        try:
            return _within_timeout(doing, act)
        except Exception as raised:  # clients of stores have roots of their own
            if attempt == num_attempts or isinstance(raised, _DEFINITE):
                raise _as_store_error(doing, raised, attempt) from raised
            logger.warning("%s failed (%r), attempt %s of %s", doing, raised, attempt, num_attempts)
            time.sleep(pause_s)
            pause_s *= 2
    raise AssertionError("a store is asked once at least")


def read_timeout_s() -> float:
    """Seconds that one answer may take: the setting `STORE_TIMEOUT_S`."""
    text = STORE_TIMEOUT_S.read()
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < 1e9:
        raise ConfigError(f"reading {STORE_TIMEOUT_S.name}: found {text!r}, expected seconds; correct it, or unset it")
    return timeout_s


def _within_timeout(doing: str, act: Callable[[], T]) -> T:
    """What ``act`` returns. `NoAnswerError` when it takes too long; its thread ends with the call, or the process."""
    timeout_s, answer = read_timeout_s(), Future[T]()
    silent_s = min(_SILENT_S, timeout_s / 2)

    def fulfil() -> None:
        try:
            answer.set_result(act())
        except BaseException as raised:  # belongs to the caller
            answer.set_exception(raised)

    try:
        make_thread("store", fulfil, daemon=True).start()
    except RuntimeError:  # the process is ending, and gives no more threads
        fulfil()
    if not wait([answer], silent_s).done:
        logger.warning("%s: no answer for %g s, waiting %g s in all", doing, silent_s, timeout_s)
        wait([answer], timeout_s - silent_s)
    if not answer.done():
        raise NoAnswerError(f"no answer for {timeout_s:g} s ({STORE_TIMEOUT_S.name})")
    return answer.result()


def _as_store_error(doing: str, raised: Exception, attempt: int) -> Exception:
    """Convert an error of a client to one that the interface promises; errors of known types stay."""
    if isinstance(raised, _KNOWN):
        return raised
    if isinstance(raised, ImportError):
        return StoreFailedError(f"{doing}: the client of this store is not installed ({raised}); install it")
    times = "once" if attempt == 1 else f"{attempt} times"
    return StoreFailedError(
        f"{doing}: tried {times}, expected an answer, found {type(raised).__name__}: {raised}; correct the URL, the "
        "network or the rights (the store's client takes credentials from the environment) and try again"
    )
