"""Public verbs are kept out of torch.compile: what a compiled caller calls of Remesh is run, and not traced."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any

from remesh.checkpoint.background.queue import AsyncCallsQueue
from remesh.comm import gather
from remesh.foundation.torch_private import functions_of
from remesh.integrations.dcp import DcpReader, DcpWriter
from tests.rules.test_imports import PURE

_FACES = ("remesh", "remesh.dist_checkpointing", "remesh.elasticity", "remesh.pipeline", "remesh.resharding")
_BESIDE = (AsyncCallsQueue, DcpReader, DcpWriter, gather.all_gather_json, gather.gather_bytes, gather.gather_from)


def _verbs() -> Iterator[Callable[..., Any]]:
    """Functions and classes of the faces that are not pure, but those that only hold values."""
    yield from _BESIDE
    for face in map(importlib.import_module, _FACES):
        for found in (getattr(face, name) for name in face.__all__):
            is_verb = isinstance(found, FunctionType) or (isinstance(found, type) and not _is_data(found))
            if is_verb and found.__module__ not in PURE:
                yield found


def _is_data(kind: type[Any]) -> bool:
    return is_dataclass(kind) or issubclass(kind, (Enum, Exception))


def test_public_verbs_are_kept_out_of_compiled_callers() -> None:
    functions = [(verb.__qualname__, one) for verb in _verbs() for one in functions_of(verb)]
    assert {"save", "Refit"} <= {name for name, _ in functions}
    wrong = {name for name, function in functions if not getattr(function, "_torchdynamo_disable", False)}
    assert not wrong, f"without never_compiled, which keeps Dynamo out: {sorted(wrong)}"
