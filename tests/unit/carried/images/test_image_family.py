"""The plan by which a tree of processes is made again, carried out on a small model of the kernel."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from remesh.carried.images.form.family import INIT, OUTSIDE, FamilyDeed, FamilyStep, Kin, plan_family

_ROOT = 1000


@dataclass
class Process:
    """What the kernel keeps of one."""

    parent: int
    group: int
    session: int
    children: list[int] = field(default_factory=list)


class Kernel:
    """Processes with their parents, groups and sessions, by the rules of setsid(2), setpgid(2) and fork(2)."""

    def __init__(self) -> None:
        self.processes = {INIT: Process(0, INIT, OUTSIDE)}

    def fork(self, parent: int, pid: int) -> None:
        assert pid not in self.processes
        assert all(pid not in (each.group, each.session) for each in self.processes.values())
        maker = self.processes[parent]
        maker.children.append(pid)
        self.processes[pid] = Process(parent, maker.group, maker.session)

    def lead_session(self, pid: int) -> None:
        assert all(each.group != pid for each in self.processes.values())
        self.processes[pid].group = self.processes[pid].session = pid

    def enter_group(self, pid: int, group: int) -> None:
        one = self.processes[pid]
        assert one.session != pid
        assert group == pid or any(
            each.group == group and each.session == one.session for each in self.processes.values()
        )
        one.group = group

    def leave(self, pid: int) -> None:
        one = self.processes.pop(pid)
        self.processes[one.parent].children.remove(pid)
        for child in one.children:
            self.processes[child].parent = INIT
            self.processes[INIT].children.append(child)

    def kin(self) -> list[Kin]:
        return [
            Kin(pid, each.parent, each.group, each.session, None, "p")
            for pid, each in sorted(self.processes.items())
            if pid != INIT
        ]


def random_history(seed: int) -> Kernel:
    """A tree as programs make it: forks, daemons, jobs of shells, and parents that end before their children."""
    chance = random.Random(seed)
    kernel = Kernel()
    kernel.fork(INIT, _ROOT)
    kernel.enter_group(_ROOT, _ROOT)
    next_pid = _ROOT + 1
    for _ in range(chance.randrange(1, 40)):
        pid = chance.choice([each for each in kernel.processes if each != INIT])
        one = kernel.processes[pid]
        deed = chance.random()
        if deed < 0.55:
            kernel.fork(pid, next_pid)
            next_pid += 1
        elif deed < 0.7 and one.session != pid and all(each.group != pid for each in kernel.processes.values()):
            kernel.lead_session(pid)
        elif deed < 0.85 and one.session != pid:
            groups = {each.group for each in kernel.processes.values() if each.session == one.session} - {INIT}
            kernel.enter_group(pid, chance.choice([pid, *sorted(groups)]))
        elif pid != _ROOT:
            kernel.leave(pid)
    return kernel


def carry_out(steps: list[FamilyStep]) -> Kernel:
    kernel = Kernel()
    for step in steps:
        if step.deed is FamilyDeed.FORK:
            kernel.fork(step.other, step.pid)
        elif step.deed is FamilyDeed.LEAD_SESSION:
            kernel.lead_session(step.pid)
        elif step.deed is FamilyDeed.LEAVE:
            assert kernel.processes[step.pid].parent == step.other
            kernel.leave(step.pid)
        else:
            kernel.enter_group(step.pid, step.pid if step.deed is FamilyDeed.LEAD_GROUP else step.other)
    return kernel


def test_a_plan_makes_exactly_the_tree_that_was() -> None:
    orphans = 0
    for seed in range(3000):
        kin = random_history(seed).kin()
        assert carry_out(plan_family(kin)).kin() == kin, seed
        orphans += any(each.parent == INIT and each.session not in (each.pid, OUTSIDE) for each in kin)
    assert orphans > 100


_ROOT_KIN = Kin(_ROOT, INIT, _ROOT, OUTSIDE, None, "root")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Kin(1001, 1002, 1001, OUTSIDE, None, "a"), "1001.*does not descend from init"),
        (Kin(1001, 1001, 1001, OUTSIDE, None, "a"), "1001.*does not descend from init"),
        (Kin(1001, INIT, _ROOT, 7, None, "a"), "several sessions"),
        (Kin(1001, _ROOT, 1001, 7, None, "a"), "1001.*is in session 7, which its parent.*never was in"),
        (Kin(1001, _ROOT, _ROOT, 1001, None, "a"), "leads a session and is in group 1000"),
        (replace(_ROOT_KIN), "expected each once"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(other: Kin, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_family([_ROOT_KIN, other])


def test_ids_from_outside_of_the_tree_are_refused() -> None:
    for wrong in ({"pid": 1}, {"group": 0}, {"session": -1}, {"parent": 0}):
        with pytest.raises(ValueError, match="outside of the tree"):
            replace(_ROOT_KIN, **wrong)
