"""What is not carried over checkpoints: ports between jobs, and representations of data. Each says so by its name."""

from __future__ import annotations

from typing import Any, NoReturn


def _absent_function(name: str, why: str) -> Any:
    def function(*args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"MPI.{name}: {why}")

    function.__name__ = name
    return function


FUNCTIONS = {
    name: _absent_function(name, "ports between jobs are not carried over checkpoints")
    for name in ("Open_port", "Close_port", "Publish_name", "Unpublish_name", "Lookup_name")
} | {"Register_datarep": _absent_function("Register_datarep", "files are of the representation 'native'")}
