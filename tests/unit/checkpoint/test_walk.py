"""Number of files that a save and a load of one tensor go through, counted; with -s the walk is shown."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import remesh
from remesh import dist_checkpointing, load, save
from remesh.dist_checkpointing import ShardedTensor

_SOURCE = str(Path(remesh.__file__).parent)


class _Walk:
    """The functions of the package that are called, by file, in the order in which files are entered."""

    def __init__(self) -> None:
        self.called: dict[str, list[str]] = {}
        self.num_changes = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(_SOURCE):
            return
        names = self.called.setdefault(file[len(_SOURCE) + 1 :], [])
        if frame.f_code.co_qualname not in names:
            names.append(frame.f_code.co_qualname)
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        self.num_changes += caller.startswith(_SOURCE) and caller != file

    def __str__(self) -> str:
        lines = [f"{file}: {', '.join(names)}" for file, names in self.called.items()]
        return "\n".join([*lines, f"{len(self.called)} files, {self.num_changes} changes of file"])


def walk_of(act: Callable[[], Any]) -> _Walk:
    """What is called, on this thread and those that are started meanwhile."""
    walk = _Walk()
    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        act()
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    print(walk)
    return walk


def _entity(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {name: ShardedTensor.from_rank_offsets(name, tensor)}


@pytest.fixture(autouse=True)
def _imported_and_known(tmp_path: Path) -> None:
    """Modules are imported, and dtypes looked up, by a save and a load of another state."""
    other, theirs = torch.zeros(5), tmp_path / "theirs"
    save({"other": other}, tmp_path / "ours")
    load({"other": other}, tmp_path / "ours")
    theirs.mkdir()
    dist_checkpointing.save(_entity("other", other), theirs)
    dist_checkpointing.load(_entity("other", other), theirs)


def test_a_save_and_a_load_of_one_tensor_walk_eighteen_files(tmp_path: Path) -> None:
    state, place = {"w": torch.arange(12.0).reshape(3, 4)}, {"w": torch.zeros(3, 4)}
    saving = walk_of(lambda: save(state, tmp_path / "c"))
    loading = walk_of(lambda: load(place, tmp_path / "c"))
    assert torch.equal(place["w"], state["w"])
    assert len(saving.called) <= 18, str(saving)
    assert len(loading.called) <= 18, str(loading)


def test_the_names_of_megatron_add_few_files_to_the_walk(tmp_path: Path) -> None:
    directory, whole, place = tmp_path / "c", torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    directory.mkdir()
    saving = walk_of(lambda: dist_checkpointing.save(_entity("w", whole), directory))
    request = _entity("w", place)
    loading = walk_of(lambda: dist_checkpointing.load(request, directory))
    assert torch.equal(place, whole)
    assert len(saving.called) <= 21, str(saving)
    assert len(loading.called) <= 23, str(loading)
