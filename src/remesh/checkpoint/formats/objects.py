"""How do values become the bytes that ``torch.save`` writes, and come back without running what a file names?

A blob of an object is a ``torch.save`` file; in data files it holds a list with one element per local object of that
name. Reading allows what ``torch.load(weights_only=True)`` allows, NumPy arrays, namespaces and what the program has
registered with ``torch.serialization.add_safe_globals``; whatever cannot be read back is refused when it is saved.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from remesh.checkpoint.errors import CheckpointFormatError, CheckpointMismatchError
from remesh.layout.from_torch import dtype_name

SAFE_GLOBALS = [
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__ if name not in ("ObjectDType", "StringDType")),
    Namespace,
    SimpleNamespace,
]
"""What pickles of arrays and scalars of plain numbers name, and of a program's arguments; building them runs no foreign
code, since both namespaces are nothing but attributes."""

_PLAIN = frozenset((bool, int, float, str, type(None)))


def read_tensor(blob: bytes, dtype: str, shape: tuple[int, ...], where: str) -> torch.Tensor:
    """The tensor of a blob, after checking that it is what the metadata says."""
    tensor = _load(blob, where)
    is_tensor = isinstance(tensor, torch.Tensor)
    found = (dtype_name(tensor.dtype), tuple(tensor.shape)) if is_tensor else type(tensor).__name__
    if found != (dtype, shape):
        raise CheckpointFormatError(
            "wrong-blob",
            f"reading {where}: expected a tensor of dtype {dtype} and shape {shape} as the metadata says, found "
            f"{found}; the checkpoint is damaged, use another one",
        )
    assert isinstance(tensor, torch.Tensor)
    return tensor


def dump_object(value: Any, name: str) -> bytes:
    """The blob of an object; `CheckpointMismatchError` when it could not be read back."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        unsafe = [] if _is_plain(value) else _unsafe_globals_in(file)
    except (pickle.PicklingError, TypeError, AttributeError) as raised:
        raise CheckpointMismatchError(
            f"serialising {name}: expected values that can be pickled, found: {raised}; leave it out of the state dict "
            "or wrap it in LocalNonpersistentObject"
        ) from raised
    if unsafe:
        raise CheckpointMismatchError(
            f"serialising {name}: it holds instances of {', '.join(sorted(unsafe))}, which could not be loaded again "
            "safely; save plain values instead, or allow the class with torch.serialization.add_safe_globals in every "
            "program that saves or loads"
        )
    return file.getvalue()


def _is_plain(value: Any) -> bool:
    """Whether a value is a nest of numbers and texts, whose pickle names no class at all."""
    kind = type(value)
    if kind is dict:
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    return kind in _PLAIN or (kind in (list, tuple) and all(map(_is_plain, value)))


def _unsafe_globals_in(file: io.BytesIO) -> list[str]:
    file.seek(0)
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        return torch.serialization.get_unsafe_globals_in_checkpoint(file)


def load_object(blob: bytes, where: str) -> Any:
    """The object of a blob, on the CPU."""
    return _load(blob, where)


def _load(blob: bytes, where: str) -> Any:
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as raised:
        raise CheckpointFormatError(
            "forbidden-global",
            f"reading {where}: it needs a class that is not known to be safe ({_first_line(raised)}); if the file is "
            "to be trusted, allow the class with torch.serialization.add_safe_globals",
        ) from raised
    except Exception as raised:  # a damaged blob raises almost anything
        raise CheckpointFormatError(
            "bad-blob",
            f"reading {where}: expected {len(blob)} bytes written by torch.save, found that they do not parse "
            f"({_first_line(raised)}); the checkpoint is damaged, use another one",
        ) from raised


def _first_line(raised: BaseException) -> str:
    return (str(raised).strip().splitlines() or [type(raised).__name__])[0][:200]
