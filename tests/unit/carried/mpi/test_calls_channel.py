"""Two mappings of one channel hand requests and replies over."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remesh.carried.mpi import channel as module
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.lower.half import MpiLowerHalf
from remesh.carried.mpi.native import NATIVE
from remesh.foundation.errors import FormatError, StorageError
from tests.unit.carried.mpi.fake_mpi import call_lower


def test_replies_go_to_the_slots_that_asked(tmp_path: Path) -> None:
    path = str(tmp_path / "channel")
    lower, upper = SharedChannel.create(path), SharedChannel.map(path)
    num_calls = 30
    got: dict[int, list[int]] = {slot: [] for slot in range(3)}

    def ask(slot: int) -> None:
        for number in range(num_calls):
            upper.bodies[slot][0] = number
            call_lower(upper, slot)
            got[slot].append(upper.bodies[slot][0])

    threads = [threading.Thread(target=ask, args=(slot,)) for slot in got]
    for thread in threads:
        thread.start()
    answered = 0
    while answered < num_calls * len(got):
        waiting = lower.pending()
        for slot in got:
            if waiting >> slot & 1:
                lower.bodies[slot][0] += 100
                lower.answer(slot)
                answered += 1
        if not waiting:
            os.sched_yield()
    for thread in threads:
        thread.join()
    assert got == {slot: [100 + number for number in range(num_calls)] for slot in got}
    assert lower.request_number(1) == num_calls


def test_an_unanswered_request_is_found_by_another_mapping(tmp_path: Path) -> None:
    path = str(tmp_path / "channel")
    first, upper = SharedChannel.create(path), SharedChannel.map(path)
    thread = threading.Thread(target=call_lower, args=(upper, 2))
    thread.start()
    while not first.pending():
        os.sched_yield()
    second = SharedChannel.map(path)
    assert second.pending() == 1 << 2
    second.answer(2)
    thread.join()
    assert second.pending() == 0


def test_memory_is_read_and_written_by_its_address() -> None:
    memory = module.RemoteMemory(os.getpid())
    target = bytearray(b"0123456789")
    address = NATIVE.address_of(target)
    memory.write(address + 2, b"ab")
    assert memory.read(address, 5) == b"01ab4"
    with pytest.raises(OSError):
        memory.read(8, 4)


def test_a_file_that_is_no_channel_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(bytes(SharedChannel.SIZE_BYTES))
    with pytest.raises(FormatError, match="no channel|begins with"):
        SharedChannel.map(str(foreign))
    short = tmp_path / "short"
    short.write_bytes(b"RMSHCHN1")
    with pytest.raises(StorageError):
        SharedChannel.map(str(short))


def test_a_channel_that_came_with_the_image_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "channel"
    channel = SharedChannel.create(str(path))
    channel.check("looking at a new one")
    with path.open("r+b") as file:
        file.write(b"RMSHCHN2")
    with pytest.raises(FormatError, match="serving a program: the channel begins with b'RMSHCHN2'"):
        channel.check("serving a program")


def test_a_program_that_has_come_with_its_channel_hears_the_pace_of_this_host(tmp_path: Path) -> None:
    channel = SharedChannel.create(str(tmp_path / "channel"))
    half: Any = object.__new__(MpiLowerHalf)
    half._channel, half._engine, half._attached = channel, SimpleNamespace(attach=print), {}
    half._reopened, half._collectives = [], SimpleNamespace(reopen=list)
    half._pace = SimpleNamespace(upper_spin=7, give_way_us=11)
    half._memory, half.open = SimpleNamespace(attach=lambda pid: None), lambda: None
    channel.set_pace(1000, 50)  # what the image brought
    half.attach(1)
    assert list(channel._pace_words) == [7, 11]


def test_a_channel_is_never_made_over_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "channel")
    SharedChannel.create(path)
    with pytest.raises(StorageError, match="File exists"):
        SharedChannel.create(path)
