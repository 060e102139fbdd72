"""The file of metrics: what the application measured at a checkpoint's step, ``metrics.json``, a JSON object.

It is staged by the save and gets its name at the commit, so a complete checkpoint has the metrics of its own save, and
none of another job's that began in the same directory. Other readers of the directory pass over the file. A number that
JSON lacks is written as Python does: ``NaN``, ``Infinity``, ``-Infinity``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.formats.directory import METRICS_FNAME
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import parsing


def encode_metrics(metrics: Mapping[str, float]) -> str:
    """The text of the file; equal metrics have equal texts, NaN included."""
    return json.dumps({name: float(value) for name, value in metrics.items()}, sort_keys=True)


def read_metrics(directory: Location) -> dict[str, float]:
    """Metric by name of a checkpoint; empty if it was saved without. `CheckpointFormatError` for anything else."""
    path = directory / METRICS_FNAME
    try:
        content = store_of(path).read(path)
    except FileNotFoundError:
        return {}
    hint = "correct the file, or remove it, and the checkpoint has no metrics"
    with parsing("bad-metrics", f"reading the metrics {path}", "a JSON object of numbers", hint):
        found = json.loads(content)
        if not all(_is_number(value) for value in found.values()):
            raise ValueError(content[:80])
    return {name: float(value) for name, value in found.items()}


def check_is_known(metric: str, found: Iterable[Mapping[str, float]], doing: str) -> None:
    """`CheckpointMismatchError` if no checkpoint has this metric: a misspelt name must not choose what is removed."""
    known = sorted({name for metrics in found for name in metrics})
    if metric not in known:
        raise CheckpointMismatchError(
            f"{doing}: found checkpoints with {', '.join(known) or 'no metrics'}, expected {metric!r} in one of them; "
            "give a name that was saved"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
