"""Ranks of a checkpoint that must not share a host: their shared memory would get one name there.

A name in /dev/shm is a host's own. Ranks of two hosts may each have one that others know by the same name; on one host
the second would take it from the first, and a process that opens it next would find another rank's memory. (Ranks that
share memory on one host are refused when an image is asked for: it would hold a part of something.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remesh.carried.hosts.host_list import RankSlot
from remesh.carried.rounds.job_folder import rank_name
from remesh.foundation.errors import ConfigError


def check_apart(ranks: Mapping[str, Mapping[str, Any]], slots: Sequence[RankSlot], doing: str) -> None:
    """Raise `ConfigError` if a name would be given twice on one host; ``ranks`` is what a manifest has by that name."""
    taken: dict[tuple[str, str], int] = {}
    for slot in slots:
        for name in ranks[rank_name(slot.rank)].get("shared_names", ()):
            first = taken.setdefault((slot.host, str(name)), slot.rank)
            if first != slot.rank:
                raise ConfigError(
                    f"{doing}: ranks {first} and {slot.rank} have shared memory of their own, both by the name {name}, "
                    f"and would be on host {slot.host}; put them on two hosts, as they were"
                )
