"""Chrome traces of timed messages, planned beside measured.

The trace opens in Perfetto or ``chrome://tracing``. Each source of times (``"planned"``, ``"measured"``) makes one
process for each host, and in it two tracks for each rank: what it sends and what it receives. An event is a message,
named by its other end; its arguments are round, bytes and rate. Arrows lead from the sending to the receiving track.

Format: Trace Event Format, JSON object form, complete events (``X``) and flow events (``s``, ``f``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from remesh.resharding.model.program import Timing

_US_PER_S = 1e6


def build_trace(sources: Mapping[str, Sequence[Timing]], host_of: Mapping[int, str]) -> dict[str, Any]:
    """The trace as JSON values; ``sources`` maps a name such as ``"planned"`` to messages with their times.

    >>> trace = build_trace({"planned": [Timing(1, 0, 0, 1, 8, 0.0, 1.0)]}, {0: "a", 1: "b"})
    >>> [(event["name"], event["dur"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    [('to rank 1', 1000000.0), ('from rank 0', 1000000.0)]
    """
    events: list[dict[str, Any]] = []
    hosts = list(dict.fromkeys(host_of.values()))
    for at, (source, messages) in enumerate(sources.items()):
        process_of = {host: at * len(hosts) + number for number, host in enumerate(hosts)}
        events += _names(source, at, messages, host_of, process_of)
        for number, message in enumerate(messages):
            tracks = [
                {"pid": process_of[host_of[rank]], "tid": 2 * rank + way}
                for rank, way in ((message.giver, 0), (message.taker, 1))
            ]
            events += _events(message, f"{at}.{number}", tracks)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(message: Timing, identity: str, tracks: Sequence[Mapping[str, int]]) -> Iterator[dict[str, Any]]:
    seconds = message.finish_s - message.start_s
    arguments: dict[str, Any] = {"round": message.round, "bytes": message.nbytes}
    if seconds > 0:
        arguments["bytes_per_s"] = message.nbytes / seconds
    names = (f"to rank {message.taker}", f"from rank {message.giver}")
    start_us = message.start_s * _US_PER_S
    for name, phase, track in zip(names, ("s", "f"), tracks, strict=True):
        yield {"ph": "X", "name": name, "ts": start_us, "dur": seconds * _US_PER_S, "args": arguments, **track}
        yield {"ph": phase, "name": "message", "cat": "message", "id": identity, "ts": start_us, **track}


def _names(
    source: str,
    at: int,
    messages: Iterable[Timing],
    host_of: Mapping[int, str],
    process_of: Mapping[str, int],
) -> Iterator[dict[str, Any]]:
    for host, process in process_of.items():
        yield _name("process_name", {"pid": process}, f"{source}: {host}")
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process + at}}
    for rank in sorted({rank for message in messages for rank in (message.giver, message.taker)}):
        for way, verb in enumerate(("sends", "receives")):
            track = {"pid": process_of[host_of[rank]], "tid": 2 * rank + way}
            yield _name("thread_name", track, f"rank {rank} {verb}")


def _name(kind: str, track: Mapping[str, int], text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "args": {"name": text}, **track}
