"""Refits between random layouts, while readers come and go and members join, leave and die: one version, whole.

The oracle is the catalogue of each version: every view of a snapshot has the values of the version that the snapshot is
named after, when it is taken and when it is let go.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from remesh.foundation.errors import PeerError, PlanError
from remesh.layout.from_torch import Piece
from remesh.resharding import Refit
from remesh.resharding.refit import RefitHandle, Snapshot
from remesh.resharding.running.carry import Link
from remesh.testbed.pool import RankPool
from tests.procs.checkpoint.random_plain_states import Catalogue, Side, bits_of, draw_side
from tests.profiles import seeds

NUM_RANKS = 4
_MOST_READERS = 3


class Readers:
    """Threads that look at snapshots all the time, and remember what they saw that no version has."""

    def __init__(self, refit: Refit, side: Side, versions: dict[int, Catalogue]) -> None:
        self._refit, self._side, self._versions = refit, side, versions
        self._running: list[tuple[threading.Thread, threading.Event]] = []
        self.wrong: list[str] = []
        self.num_looks = 0

    def become(self, num: int) -> None:
        """So many readers: others join, or leave when they have let go of what they hold."""
        while len(self._running) < num:
            is_over = threading.Event()
            thread = threading.Thread(target=self._read_on, args=(is_over,), daemon=True)
            thread.start()
            self._running.append((thread, is_over))
        leaving, self._running = self._running[num:], self._running[:num]
        for _, is_over in leaving:
            is_over.set()
        for thread, _ in leaving:
            thread.join()

    def _read_on(self, is_over: threading.Event) -> None:
        try:
            while not is_over.is_set():
                self.look(hold_s=random.random() * 0.01)
        except BaseException as raised:  # of a thread nobody would hear it
            self.wrong.append(repr(raised))
            raise

    def look(self, hold_s: float = 0.0) -> None:
        """Take a snapshot, and compare it before and after it was held."""
        with self._refit.read() as snapshot:
            self._compare(snapshot, "taken")
            time.sleep(hold_s)
            self._compare(snapshot, "let go")
        self.num_looks += 1

    def _compare(self, snapshot: Snapshot, when: str) -> None:
        right = self._versions[snapshot.version]
        for name, views in self._side.seen.items():
            storage = _memory_of(snapshot.tensors[name]).untyped_storage()
            for view, box in views:
                if bits_of(_at_same_place(view, storage)) != bits_of(right.wholes[name][box.slices()]):
                    self.wrong.append(f"{name} of version {snapshot.version}, {box}, when it was {when}")


def _memory_of(held: torch.Tensor | Piece) -> torch.Tensor:
    if isinstance(held, Piece):
        return held.tensor
    return held.to_local() if isinstance(held, DTensor) else held


def _at_same_place(view: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The same view of the other one of the two buffers."""
    seen = torch.empty(0, dtype=view.dtype)
    return seen.set_(storage, view.storage_offset(), view.shape, view.stride())  # type: ignore[no-any-return]


def _version_of(catalogue: Catalogue, version: int) -> Catalogue:
    """Other values under the same names."""
    generator = torch.Generator().manual_seed(version)
    wholes: dict[str, torch.Tensor] = {}
    for name, whole in catalogue.wholes.items():
        first = catalogue.tied.get(name)
        new = torch.randint(0, 90, whole.shape, generator=generator).to(whole.dtype)
        wholes[name] = new if first is None else wholes[first]
    return replace(catalogue, wholes=wholes)


def _give(catalogue: Catalogue, seed: int, members: list[int]) -> dict[str, Any]:
    """What this rank holds of a version, some of it as addends."""
    chance, rank = random.Random(seed), dist.get_rank()
    side = draw_side(catalogue, seed, rank, members)
    side.fill(catalogue)
    give: dict[str, Any] = dict(side.tensors)
    tied = {*catalogue.tied, *catalogue.tied.values()}
    for name, whole in catalogue.wholes.items():
        if whole.dtype != torch.int64 or name in tied or chance.random() < 0.5:
            continue
        holders = chance.sample(members, chance.randint(1, len(members)))
        generator = torch.Generator().manual_seed(seed)
        addends = [torch.randint(-9, 9, whole.shape, generator=generator) for _ in holders[1:]]
        addends.append(whole - sum(addends, torch.zeros_like(whole)))
        give.pop(name, None)
        if rank in holders:
            mesh = DeviceMesh("cpu", torch.tensor(holders), _init_backend=False)
            local = addends[holders.index(rank)]
            give[name] = DTensor.from_local(local, mesh, [Partial("sum")], run_check=False)
    return give


class Story:
    """One rank's part of a story that all ranks draw alike."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rank = dist.get_rank()
        """In the group of all, which loses one who dies."""
        self.catalogue = Catalogue.draw(seed, self.chance.randint(1, 10))
        # A tensor of zero elements makes no plan; there is one with some in every state.
        self.catalogue.wholes.setdefault("model.w", torch.zeros(5, 3, dtype=torch.int64))
        side = draw_side(self.catalogue, self.chance.randrange(1 << 30), self.rank, NUM_RANKS)
        self.members = [*range(NUM_RANKS)]
        self.versions: dict[int, Catalogue] = {}
        self.refit = Refit(
            side.tensors, chunk_bytes=self.chance.choice([64, 200, 1 << 22]), host_of=self._hosts(NUM_RANKS)
        )
        self.readers = Readers(self.refit, side, self.versions)
        self._layout = 0

    def _hosts(self, num_ranks: int) -> dict[int, str]:
        num_hosts = self.chance.choice([1, 2, 4])
        return {rank: f"h{rank % num_hosts}" for rank in range(num_ranks)}

    def start(self) -> RefitHandle:
        """The next version, in the layout of the one before, or in another."""
        if not self._layout or self.chance.random() < 0.4:
            self._layout = self.chance.randrange(1 << 30)
        version = len(self.versions) + 1
        self.versions[version] = _version_of(self.catalogue, version)
        give = _give(self.versions[version], self._layout, self.members)
        return self.refit.start(give, version if give or self.rank == self.members[0] else None)

    def go_on(self) -> None:
        """One thing that happens."""
        num_readers = self.chance.randint(0, _MOST_READERS)
        if self.chance.random() < 0.3:
            self._regroup()
        if self.rank not in self.members:
            self._skip()
            return
        handle = self.start()
        if self.versions.keys() - {1}:
            self.readers.become(num_readers if self.refit.version is not None else 0)
        if self.chance.random() < 0.3:
            with pytest.raises(PlanError, match="was started and its result was never asked for"):
                self.refit.start({}, 0)
        handle.result()
        self.readers.look()
        assert self.refit.version == len(self.versions)

    def _skip(self) -> None:
        """Draw as those who go on, who are without this rank."""
        if not self._layout or self.chance.random() < 0.4:
            self._layout = self.chance.randrange(1 << 30)
        self.versions[len(self.versions) + 1] = _version_of(self.catalogue, len(self.versions) + 1)
        self.chance.random()

    def _regroup(self) -> None:
        """Members leave or join."""
        members = sorted(self.chance.sample(range(NUM_RANKS), self.chance.randint(1, NUM_RANKS)))
        group, hosts = dist.new_group(members), self._hosts(len(members))
        self.members, self._layout = members, 0
        if self.rank in members:
            self.refit.regroup(group, hosts)

    def lose_one(self, victim: int, after: int) -> None:
        """A rank of all dies in a refit, after so many messages or at its end; the others go on in a new group."""
        self._regroup_all(dist.group.WORLD, NUM_RANKS)
        before, left = self.refit.version, [after]
        real = Link.give

        def give(*args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        with pytest.MonkeyPatch.context() as patch:
            if self.rank == victim:
                patch.setattr(Link, "give", give)
            try:
                self.start().result()
            except PeerError:
                assert self.refit.version == before
        if self.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.refit.version is not None:
            self.readers.look()
        survivors = [rank for rank in range(NUM_RANKS) if rank != victim]
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        self.rank = survivors.index(self.rank)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("after", store), rank=self.rank, world_size=len(survivors)
        )
        self._regroup_all(None, len(survivors))

    def _regroup_all(self, group: dist.ProcessGroup | None, num_ranks: int) -> None:
        self.members, self._layout = [*range(num_ranks)], 0
        self.refit.regroup(group, self._hosts(num_ranks))


def refit_at_random(seed: int, victim: int | None) -> int:
    """How often readers looked."""
    story = Story(seed)
    for _ in range(story.chance.randint(3, 8)):
        story.go_on()
    if victim is not None:
        story.lose_one(victim, after=story.chance.randint(1, 12))
        for _ in range(3):
            story.start().result()
            story.readers.look()
    story.readers.become(0)
    assert not story.readers.wrong, (seed, story.readers.wrong[:5])
    return story.readers.num_looks


@pytest.mark.parametrize("seed", seeds(40, quick=4))
def test_readers_see_one_whole_version_whatever_the_layouts_and_the_members(ranks: RankPool, seed: int) -> None:
    assert sum(ranks.run(refit_at_random, NUM_RANKS, (seed, None)))


@pytest.mark.parametrize("seed", seeds(24, quick=2))
def test_readers_see_one_whole_version_when_a_rank_dies(ranks: RankPool, seed: int) -> None:
    victim = seed % NUM_RANKS
    told = ranks.run(refit_at_random, NUM_RANKS, (1000 + seed, victim), dying=[victim])
    assert sum(looks for looks in told if isinstance(looks, int))
