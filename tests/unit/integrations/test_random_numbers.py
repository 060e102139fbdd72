"""Each rank's random numbers go on where they were: Python's, NumPy's, and torch's on the CPU and the device."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import remesh
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.integrations import random_numbers
from remesh.integrations.random_numbers import random_rows, rows_to_load, take_random_rows


class _Device:
    """A device that has nothing but a state of random numbers, as ``torch.cuda`` has it."""

    def __init__(self) -> None:
        self.state = torch.arange(16, dtype=torch.uint8)

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


def _draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(), float(np.random.rand()), float(torch.rand(()))


def _go_back(path: Path) -> None:
    rows = rows_to_load(open_checkpoint(path).manifest.tensors)
    take_random_rows(remesh.load({"random": rows}, path)["random"])


def test_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    remesh.save({"random": random_rows()}, tmp_path / "c")
    expected = _draw()
    _go_back(tmp_path / "c")
    assert _draw() == expected


@pytest.mark.parametrize(("at_save", "at_load"), [(True, True), (True, False), (False, True)])
def test_numbers_of_a_device_go_on_where_there_is_one_both_times(tmp_path: Path, at_save: bool, at_load: bool) -> None:
    device = _Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_numbers, "_device_module", lambda: device if at_save else None)
        remesh.save({"random": random_rows()}, tmp_path / "c")
        saved, expected = device.state, _draw()
        device.state = torch.zeros(16, dtype=torch.uint8)
        patch.setattr(random_numbers, "_device_module", lambda: device if at_load else None)
        _go_back(tmp_path / "c")
    assert device.state.equal(saved) == (at_save and at_load) and _draw() == expected


def test_rows_of_another_number_of_ranks_are_left_alone() -> None:
    stored = {f"random.{name}": SimpleNamespace(global_shape=(2, 9)) for name in random_rows()}
    assert rows_to_load(stored) == {}
