"""Snapshots cross between real sockets and shared memory, in one process; strangers and broken senders do no harm."""

from __future__ import annotations

import gc
import os
import random
import socket
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from remesh.device.queued_copies import CUDA, Devices
from remesh.elasticity.snapshots import snapshot_keeper as keeper_module
from remesh.elasticity.snapshots.choice import SnapshotChoice
from remesh.elasticity.snapshots.opened import read_snapshot
from remesh.elasticity.snapshots.snapshot_keeper import SnapshotKeeper
from remesh.elasticity.snapshots.snapshot_memory import SnapshotBuffer
from remesh.elasticity.snapshots.taker import Shelf, SnapshotTaker
from remesh.elasticity.training_state import HeldState
from remesh.layout.from_torch import piece_of
from remesh.testbed.quiet_limit import QuietLimit
from remesh.wire.token import Token
from tests.fake_gpu import MakeBelieveDevice

pytestmark = pytest.mark.procs
TOKEN = Token("job", b"0123456789abcdef")
TIMEOUT_S = 120.0


@pytest.fixture
def keeper() -> Iterator[SnapshotKeeper]:
    with SnapshotKeeper("127.0.0.1", TOKEN) as one:
        yield one


def taker_for(
    keeper: SnapshotKeeper, token: Token = TOKEN, devices: Devices = CUDA
) -> tuple[SnapshotTaker, list[dict[str, object]]]:
    events: list[dict[str, object]] = []

    def log(kind: str, **values: object) -> None:
        events.append({"kind": kind, **values})

    shelf = Shelf(1, 0, ("127.0.0.1", keeper.port), token)
    return SnapshotTaker(shelf, events.append, log, devices), events


def held_at(step: int, size: int = 1000) -> HeldState:
    tensors = {
        "w": torch.full((size,), float(step), dtype=torch.bfloat16),
        "n": torch.tensor(step),
        "e": torch.empty(0),
    }
    return HeldState(step, 10 * step, {name: piece_of(one) for name, one in tensors.items()}, {"lr": step / 2})


def choice_of(held: HeldState) -> SnapshotChoice:
    return SnapshotChoice({name: frozenset(s.box for s in piece.shards) for name, piece in held.pieces.items()}, "all")


def take(taker: SnapshotTaker, held: HeldState) -> None:
    taker.take(held, choice_of(held), os.getpid())


def wait_until_sent(taker: SnapshotTaker, events: list[dict[str, object]], num_unsent: int = 1) -> None:
    """Or told so often that it could not be."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while taker.is_busy and sum(event.get("kind") == "snapshot-unsent" for event in events) < num_unsent:
        assert time.monotonic() < deadline_s, events
        time.sleep(0.005)


def steps_in(keeper: SnapshotKeeper) -> list[int]:
    found = [read_snapshot(SnapshotBuffer.open(path)) for paths in keeper.paths().values() for path in paths]
    return sorted(held.step for held in found if held is not None)


def test_neighbour_keeps_the_last_two_versions_bit_by_bit(keeper: SnapshotKeeper) -> None:
    taker, events = taker_for(keeper)
    for step in (5, 10, 15):
        take(taker, held_at(step))
        wait_until_sent(taker, events)
    assert steps_in(keeper) == [10, 15], events
    newest = max(
        (read_snapshot(SnapshotBuffer.open(path)) for path in keeper.paths()[1, 0]),
        key=lambda held: held.step if held else 0,
    )
    assert newest is not None
    expected = held_at(15)
    assert (newest.samples, newest.values) == (150, {"lr": 7.5})
    for name, piece in expected.pieces.items():
        assert torch.equal(newest.pieces[name].tensor, piece.tensor), name
    taker.close()


def test_own_snapshot_outlives_the_worker_that_made_it(keeper: SnapshotKeeper) -> None:
    """The agent keeps the worker's memory by its descriptor; then the worker closes it, as its death would."""
    taker, events = taker_for(keeper)
    take(taker, held_at(5))
    wait_until_sent(taker, events)
    message = next(event for event in events if event.get("type") == "keep")
    keeper.adopt((1, 9), os.getpid(), message["descriptors"])  # type: ignore[arg-type]
    taker.close()
    assert steps_in(keeper) == [5, 5]


def test_state_that_grew_gets_new_memory(keeper: SnapshotKeeper) -> None:
    """After its first step the optimizer has moments."""
    taker, events = taker_for(keeper)
    take(taker, held_at(5))
    wait_until_sent(taker, events)
    take(taker, held_at(10, size=500_000))
    wait_until_sent(taker, events)
    assert steps_in(keeper)[-1] == 10
    taker.close()


def test_wrong_token_keeps_nothing_and_stops_the_sender(keeper: SnapshotKeeper) -> None:
    taker, events = taker_for(keeper, Token("job", b"another-secret-of-a-stranger"))
    take(taker, held_at(5))
    wait_until_sent(taker, events)
    assert taker.is_busy, "no further snapshot is taken before this one is kept"
    assert steps_in(keeper) == []
    taker.close()


def test_keeper_without_room_is_told_and_asked_again(keeper: SnapshotKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is short of memory for a while; what it keeps stays whole until there is room."""
    taker, events = taker_for(keeper)
    for step in (5, 10):
        take(taker, held_at(step))
        wait_until_sent(taker, events)
    with monkeypatch.context() as short:
        short.setattr(keeper_module, "_free_bytes", lambda: 1000)
        take(taker, held_at(15))
        wait_until_sent(taker, events)
        taker.send_again()
        wait_until_sent(taker, events, num_unsent=2)
        assert taker.is_busy and steps_in(keeper) == [5, 10]
    unsent = [event for event in events if event.get("kind") == "snapshot-unsent"]
    assert [event["step"] for event in unsent] == [15, 15]
    assert "has no memory for" in str(unsent[0]["reason"])
    taker.send_again()
    wait_until_sent(taker, events, num_unsent=3)
    assert not taker.is_busy and steps_in(keeper) == [10, 15]
    taker.send_again()
    assert not taker.is_busy, "what is kept is not sent again"
    taker.close()


def test_garbage_slow_and_cut_connections_do_no_harm(keeper: SnapshotKeeper) -> None:
    """Two hundred strangers talk nonsense, or nothing; a member's snapshot is kept all the same."""
    chance = random.Random(7)
    silent = [socket.create_connection(("127.0.0.1", keeper.port)) for _ in range(20)]
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", keeper.port)) as stranger:
            stranger.settimeout(TIMEOUT_S)
            try:
                stranger.recv(chance.choice([0, 32]) or 1)
                stranger.sendall(chance.randbytes(chance.randrange(3000)) + chance.choice([b"", b"\n", b"{}\n"]))
            except OSError:
                continue
    taker, events = taker_for(keeper)
    take(taker, held_at(5))
    wait_until_sent(taker, events)
    assert steps_in(keeper) == [5], events
    for one in silent:
        one.close()
    taker.close()


def test_device_memory_is_complete_once_it_has_arrived_and_then_sent(keeper: SnapshotKeeper) -> None:
    device = MakeBelieveDevice(random.Random(3))
    weight = device.empty(1000)
    taker, events = taker_for(keeper, devices=device)
    for step in (5, 10, 15):
        device.program.run(partial(weight.fill_, float(step)))
        pieces = {"w": piece_of(weight), "n": piece_of(torch.tensor(step))}
        take(taker, HeldState(step, step, pieces, {}))
        device.program.run(partial(weight.fill_, -1.0))
        wait_until_sent(taker, events)
    kept = [read_snapshot(SnapshotBuffer.open(path)) for path in keeper.paths()[1, 0]]
    assert {(held.step, held.pieces["w"].tensor.unique().item()) for held in kept if held} == {(10, 10.0), (15, 15.0)}
    taker.close()
    assert not device.faults


def test_what_a_device_loses_leaves_the_older_snapshots_whole(keeper: SnapshotKeeper) -> None:
    device = MakeBelieveDevice(random.Random(4))
    weight = device.empty(1000)
    taker, events = taker_for(keeper, devices=device)
    for step in (5, 10):
        take(taker, HeldState(step, step, {"w": piece_of(weight)}, {}))
        wait_until_sent(taker, events)
    device.refuses.add("arrive")
    take(taker, HeldState(15, 15, {"w": piece_of(weight)}, {}))
    wait_until_sent(taker, events)
    device.refuses.clear()
    taker.send_again()
    wait_until_sent(taker, events, num_unsent=2)
    assert taker.is_busy, "no further snapshot is taken over one that is whole"
    assert "make-believe error: the device is lost" in str(events[-1]["reason"])
    message = next(event for event in events if event.get("type") == "keep")
    own = [read_snapshot(SnapshotBuffer.open(f"/proc/self/fd/{one}")) for one in message["descriptors"]]  # type: ignore[attr-defined]
    assert [held and held.step for held in own] == [None, 10]
    assert steps_in(keeper) == [5, 10]
    taker.close()
    limit = QuietLimit(lambda: len(device.locked), TIMEOUT_S)
    while device.locked:  # nobody keeps what was not sent; what was on its way lands in memory that is still there
        assert not limit.is_over()
        time.sleep(0.05)
        gc.collect()  # an error refers to what it came from, and that to the error


def test_memory_that_a_tensor_looks_into_outlives_its_buffer() -> None:
    buffer = SnapshotBuffer.make(100)
    memory, seen = buffer.memory, torch.frombuffer(buffer.memory, dtype=torch.uint8)
    buffer.close()
    assert not memory.closed
    assert seen.fill_(7).eq(7).all()
