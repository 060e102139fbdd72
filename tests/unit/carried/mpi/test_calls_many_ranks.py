"""A communicator may have more members, and a collective more counts, than a slot has room for."""

from __future__ import annotations

import os
import struct
from unittest.mock import MagicMock

import pytest

from remesh.carried.mpi.calls.table import BY_NAME, MAX_COUNTS, OK, Kind
from remesh.carried.mpi.calls.words import BODY_BYTES
from remesh.carried.mpi.lower.serving import Serving
from remesh.carried.mpi.lower.upper_memory import UpperMemory
from remesh.carried.mpi.native import NATIVE

pytestmark = pytest.mark.unit


def _serving() -> Serving:
    memory = UpperMemory()
    memory.attach(os.getpid())
    return Serving(MagicMock(), MagicMock(mpi_error=RuntimeError), MagicMock(), memory, MagicMock())


def _ask(serving: Serving, call: str, fields: tuple[int, ...], tail: bytes = b"") -> None:
    body = memoryview(bytearray(BODY_BYTES))
    packer = BY_NAME[call].packer
    packer.pack_into(body, 0, BY_NAME[call].number, *fields)
    body[packer.size : packer.size + len(tail)] = tail
    serving.serve(0, body)
    assert body[0] == OK, bytes(body[:200])


def test_a_communicator_of_a_million_ranks_is_known() -> None:
    serving, ranks = _serving(), range(1_000_000)
    packed = struct.pack(f"<{len(ranks)}i", *ranks)
    _ask(serving, "make_communicator", (7, len(ranks), NATIVE.address_of(packed)))
    serving.collectives.add.assert_called_once_with(7, tuple(ranks))  # type: ignore[attr-defined]  # a mock


@pytest.mark.parametrize("num_ranks", [1, MAX_COUNTS // 2, MAX_COUNTS // 2 + 1, 40_000])
def test_counts_of_a_collective_are_read_where_they_stand(num_ranks: int) -> None:
    serving = _serving()
    counts = struct.pack(f"<{2 * num_ranks}q", *range(2 * num_ranks))
    tail = counts if 2 * num_ranks <= MAX_COUNTS else struct.pack("<Q", NATIVE.address_of(counts))
    serving.collectives.start.return_value = MagicMock(done=False, number=5)  # type: ignore[attr-defined]
    _ask(serving, "collective", (0, Kind.ALLTOALLV, 0, 0, 7, 0, 0, 0, 0, 0, 2 * num_ranks), tail)
    job = serving.collectives.start.call_args.args[1]  # type: ignore[attr-defined]
    assert job.send_counts == tuple(range(num_ranks))
    assert job.receive_counts == tuple(range(num_ranks, 2 * num_ranks))
