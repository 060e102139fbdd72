"""Requests, receives and messages as C structs, which the engine reads and writes, where the extension is there.

The dataclasses say what each field means. Both kinds have the same attributes, and everything works on either.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from remesh.mpi.lower import matching, requests
from remesh.mpi.lower.matching import Arrived, Posted
from remesh.mpi.lower.requests import Request
from remesh.mpi.native import NATIVE

if not TYPE_CHECKING and NATIVE.Engine is not None:
    Request, Arrived, Posted = NATIVE.Request, NATIVE.Arrived, NATIVE.Posted

_KINDS = {requests.Request: Request, matching.Arrived: Arrived, matching.Posted: Posted}
Record = TypeVar("Record", requests.Request, matching.Arrived, matching.Posted)

__all__ = ["Arrived", "Posted", "Request", "as_native"]


def as_native(record: Record) -> Record:
    """The same record, of the kind that a lower half works with."""
    kind = _KINDS[type(record)]
    native: Record = kind(**{field.name: getattr(record, field.name) for field in fields(record)})
    return native
