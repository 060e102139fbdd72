"""What runs while it is looked at may change in between: that is no refusal."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from remesh.carried.images.look import inspection
from remesh.foundation.linux import procfs


def test_a_descriptor_that_is_used_again_meanwhile_is_not_refused_and_a_renamed_file_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w") as file:
        found = {each.number: each for each in procfs.read_descriptors(os.getpid())}[file.fileno()]
        assert inspection._check_descriptor(os.getpid(), found) is None
        # It led to a folder when its name was read, and was closed and opened again before the next look.
        assert inspection._check_descriptor(os.getpid(), replace(found, link="/somewhere/else")) is None
        os.link(path, tmp_path / "other")
        path.unlink()
        renamed = {each.number: each for each in procfs.read_descriptors(os.getpid())}[file.fileno()]
        refusal = inspection._check_descriptor(os.getpid(), renamed)
        assert refusal is not None and "another name" in refusal.why


def test_a_thread_that_ends_while_children_are_looked_for_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "thread_ids", lambda pid: [pid, (1 << 22) + 1])
    assert procfs.children_of(os.getpid()) == procfs.children_of(os.getpid())


def test_a_process_that_ends_while_its_children_are_looked_for_has_none() -> None:
    assert procfs.children_of(1 << 22) == []  # no process has so high a number


def test_a_family_has_each_process_once_though_members_end_and_are_adopted_while_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = {1: [2, 3], 2: [4], 4: [], 5: []}  # 3 has ended, 5 was started by it and is adopted by 4

    def children_of(pid: int) -> list[int]:
        if pid not in children:
            return []
        if pid == 3:
            children[4] = [5]
        return children[pid]

    monkeypatch.setattr(procfs, "children_of", children_of)
    assert procfs.family_of(1) == [1, 2, 3, 4]
    children |= {3: [5], 4: [5]}
    assert procfs.family_of(1) == [1, 2, 3, 4, 5]
    assert procfs.family_of(4, 2) == [4, 2, 5]
