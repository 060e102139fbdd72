"""Ranks of a checkpoint that share memory, and so must be on one host at a restart.

A manifest lists the files that each rank shares: ranks that name the same one had it mapped together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remesh.foundation.errors import ConfigError


def sharing_ranks(ranks: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """The ranks of each shared file, in order. ``ranks`` is what a manifest has under that name.

    >>> sharing_ranks({"rank-0000": {"shares": ["7"]}, "rank-0001": {}, "rank-0002": {"shares": ["7"]}})
    {'7': [0, 2]}
    """
    found: dict[str, list[int]] = {}
    for name, report in sorted(ranks.items()):
        for file in report.get("shares", ()):
            found.setdefault(str(file), []).append(int(name.rpartition("-")[2]))
    return found


def check_together(ranks: Mapping[str, Mapping[str, Any]], hosts: Sequence[str], doing: str) -> None:
    """Raise `ConfigError` unless all who share memory get one host; ``hosts`` has the name of each rank's."""
    for members in sharing_ranks(ranks).values():
        first = members[0]
        apart = next((rank for rank in members if hosts[rank] != hosts[first]), None)
        if apart is not None:
            raise ConfigError(
                f"{doing}: ranks {', '.join(map(str, members))} share memory (MPI_Win_allocate_shared) and must be on "
                f"one host, but rank {first} would be on {hosts[first]} and rank {apart} on {hosts[apart]}; give hosts "
                "with their ranks, as in --hosts a:4,b:4, so that these stay together"
            )
