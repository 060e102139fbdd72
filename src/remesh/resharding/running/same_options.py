"""Planning options agreed on by all ranks.

Plans are functions of their arguments, so options must be equal everywhere, or ranks would plan differently and never
meet. All but one: ``max_staging_bytes`` may follow from each rank's own free memory. The least of all caps holds for
every rank, and a rank without one does as the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from remesh.comm.agreement import check_alike
from remesh.comm.gather import Group
from remesh.foundation.errors import PlanError
from remesh.foundation.options import check_options, check_range
from remesh.resharding.model.tasks import Missing
from remesh.resharding.planning.planner import AUTO, DEFAULT_CHUNK_BYTES, check_request
from remesh.resharding.planning.transfer import PlanOptions

DOING = "resharding"
_CAP: Final = "max_staging_bytes"
_MOST_BYTES: Final = (1 << 62) - 1
_LONG = ("host_of", "network")
"""Told as digests: as long as the group is large."""


def check_plan_options(options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for an option that nobody knows or of the wrong type, `PlanError` for a wrong value."""
    check_options(DOING, options, PlanOptions)
    check_request(DOING, options.get("chunk_bytes", DEFAULT_CHUNK_BYTES), options.get("strategy", AUTO))
    check_range(DOING, "chunk_bytes", options.get("chunk_bytes", DEFAULT_CHUNK_BYTES), least=1, most=_MOST_BYTES)
    cap = options.get(_CAP)
    if cap is not None and cap < 0:
        raise PlanError(f"{DOING}: {_CAP} is {cap}, expected a number of bytes; raise the cap, or leave it out")


def describe_options(options: PlanOptions) -> dict[str, Any]:
    """What this rank tells the others of its options, as short JSON; equal exactly when the options mean the same."""
    told = {name: _in_full(options, name) for name in sorted(PlanOptions.__annotations__)}
    for name in _LONG:
        if told[name] is not None:
            told[name] = hashlib.sha256(json.dumps(told[name], sort_keys=True).encode()).hexdigest()[:16]
    return told


def settle_options(told: Sequence[Mapping[str, Any]], options: PlanOptions, group: Group) -> PlanOptions:
    """The options that all ranks plan with, from what each has told.

    Called by every rank of the group; raises `OptionError` on all of them where options differ.
    """
    caps = [each[_CAP] for each in told if each[_CAP] is not None]
    rest = [{name: value for name, value in each.items() if name != _CAP} for each in told]
    check_alike(rest, lambda name: _in_full(options, name), group, DOING)
    settled = options.copy()
    if caps:
        settled[_CAP] = min(caps)
    return settled


def _in_full(options: PlanOptions, name: str) -> Any:
    """An option as JSON, with its default where that has a name."""
    if name == "host_of":
        hosts = options.get("host_of")
        return {str(rank): hosts[rank] for rank in sorted(hosts)} if hosts else None
    if name == "network":
        network = options.get("network")
        return network.to_json() if network is not None else None
    if name == "missing":
        return options.get("missing", Missing.REFUSE).value
    if name == "strategy":
        return options.get("strategy", AUTO)
    number = options.get("chunk_bytes") if name == "chunk_bytes" else options.get(_CAP)
    return None if number is None else int(number)
