"""Classification of an error as a network failure or the program's own, by where it comes from.

A lost peer shows as errors of many kinds, and any program may raise errors of its own whose text has "Connection
refused" or "NCCL": its database is down, its file names an option. An error is the network's if

1. its type is one of the network: a ``DistError`` of torch, or a `PeerError`;
2. it is a plain ``RuntimeError`` from C++ whose text begins with a source file of gloo, as those of collectives do; not
   one that a ``raise`` statement made;
3. it is a plain ``RuntimeError`` that came out of ``torch.distributed`` itself and speaks of a connection;

or if one that it followed from is. The same is judged from a traceback's text, where another process had the error.
"""

from __future__ import annotations

import dis
import re
from dataclasses import dataclass
from types import TracebackType

from remesh.foundation.errors import PeerError

_TYPES = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError", "PeerError")
_OUR_MODULES = ("torch.", "remesh.")
_FROM_GLOO = re.compile(r"^\[[^\]]*gloo/[^\]]*:\d+\] ")
_WORDS = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket (closed|Timeout)|NCCL (error|communicator)|"
    r"process group.*(abort|timed out)|Timed out waiting|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
_TORCHS_FILES = "/torch/distributed/"
_FRAME = re.compile(r'^  File "([^"]*)", line \d+, in .*\n(?:    (.*)\n)?', re.MULTILINE)
_CHAINED = re.compile(r"\n(?:During handling of the above exception|The above exception was the direct cause).*\n\n")


@dataclass(frozen=True, slots=True)
class _Origin:
    """The rank and place where an error was raised."""

    path: str
    """Of the innermost Python frame; empty when it is not known."""
    is_raised: bool
    """By a ``raise`` statement there; else by what was called there."""


def is_network_error(error: BaseException) -> bool:
    """Whether an exception, or what caused it, came from a collective that lost a peer rather than from user code."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, PeerError) or any(map(_is_torchs_type, type(one).__mro__)):
            return True
        if type(one) is RuntimeError and _is_networks(str(one), _origin_of(one.__traceback__)):
            return True
        pending += [one.__cause__, one.__context__]
    return False


def is_network_text(traceback: str) -> bool:
    """The same, from what ``traceback.format_exception`` made of an error elsewhere."""
    return any(map(_is_network_text, _CHAINED.split(traceback)))


def _is_network_text(part: str) -> bool:
    frames = list(_FRAME.finditer(part))
    last = part[frames[-1].end() :] if frames else part
    said = next((line for line in last.splitlines() if line and not line.startswith(" ")), "")
    kind, _, text = said.partition(": ")
    module, _, name = kind.rpartition(".")
    if name in _TYPES and f"{module}.".startswith(_OUR_MODULES):
        return True
    path, code = (frames[-1][1], frames[-1][2] or "") if frames else ("", "")
    return kind == "RuntimeError" and _is_networks(text, _Origin(path, code.split(" ")[0] == "raise"))


def _is_networks(text: str, origin: _Origin) -> bool:
    if _TORCHS_FILES in origin.path:
        return bool(_FROM_GLOO.match(text) or _WORDS.search(text))
    return not origin.is_raised and bool(_FROM_GLOO.match(text))


def _is_torchs_type(kind: type) -> bool:
    return kind.__name__ in _TYPES and f"{kind.__module__}.".startswith(_OUR_MODULES)


def _origin_of(traceback: TracebackType | None) -> _Origin:
    if traceback is None:
        return _Origin("", is_raised=False)
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    done = dis.opname[code.co_code[traceback.tb_lasti]] if traceback.tb_lasti >= 0 else ""
    return _Origin(code.co_filename, done in ("RAISE_VARARGS", "RERAISE"))
