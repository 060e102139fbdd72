"""Planners of torch's own documentation, with our writer and reader in every pair with torch's: the same comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from remesh.integrations.dcp import DcpReader, DcpWriter

_PAIRS = [(DcpWriter, DcpReader), (dcp.FileSystemWriter, DcpReader), (DcpWriter, dcp.FileSystemReader)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage"),
    pytest.mark.parametrize(("writer", "reader"), _PAIRS),
]


class _RenamingSavePlanner(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class _HalfSavePlanner(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[self._halved(item) for item in plan.items])
        return self.plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data if write_item.type is WriteItemType.BYTE_IO else data.half()

    def _halved(self, item: Any) -> Any:
        if item.tensor_data is None:
            return item
        properties = replace(item.tensor_data.properties, dtype=torch.float16)
        return replace(item, tensor_data=replace(item.tensor_data, properties=properties))


class _CommittingLoadPlanner(DefaultLoadPlanner):
    """Reads into tensors of its own."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn] = tensor


def test_names_and_dtypes_of_a_planner(tmp_path: Path, writer: Any, reader: Any) -> None:
    for planner in (_RenamingSavePlanner(), _HalfSavePlanner()):
        path = tmp_path / type(planner).__name__
        dcp.save({"w": torch.arange(4.0) / 3, "n": 3}, storage_writer=writer(path), planner=planner)
        (name,) = {"w", "foo_w"}.intersection(reader(path).read_metadata().state_dict_metadata)
        wanted = {name: torch.zeros(4)}
        dcp.load(wanted, storage_reader=reader(path))
        expected = torch.arange(4.0) / 3
        assert wanted[name].equal(expected if name == "foo_w" else expected.half().float())


def test_places_of_a_planner_are_filled_and_committed(tmp_path: Path, writer: Any, reader: Any) -> None:
    dcp.save({"w": torch.arange(4.0)}, storage_writer=writer(tmp_path))
    planner, wanted = _CommittingLoadPlanner(), {"w": torch.zeros(4)}
    dcp.load(wanted, storage_reader=reader(tmp_path), planner=planner)
    assert planner.state_dict["w"].equal(torch.arange(4.0)) and not wanted["w"].any()


def test_a_part_is_loaded_where_that_is_allowed(tmp_path: Path, writer: Any, reader: Any) -> None:
    dcp.save({"a": {"w": torch.arange(4.0), "x": torch.ones(2)}, "n": 3}, storage_writer=writer(tmp_path))
    wanted = {"a": {"w": torch.zeros(4), "new": torch.ones(1)}}
    with pytest.raises(dcp.api.CheckpointException, match=r"a\.new"):
        dcp.load(wanted, storage_reader=reader(tmp_path))
    dcp.load(wanted, storage_reader=reader(tmp_path), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert wanted["a"]["w"].equal(torch.arange(4.0)) and wanted["a"]["new"].equal(torch.ones(1))


def test_tensors_of_every_kind(tmp_path: Path, writer: Any, reader: Any) -> None:
    tied, waves = torch.arange(12.0).reshape(4, 3), torch.complex(torch.arange(3.0), torch.ones(3))
    state = {
        "tied": tied,
        "again": tied,
        "turned": tied.t(),
        "column": tied[:, 1],
        "conjugate": waves.conj(),
        "negative": waves.conj().imag,
        "eight bits": tied.to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
    }
    dcp.save(state, storage_writer=writer(tmp_path))
    wanted = {name: torch.zeros(one.shape).to(one.dtype) for name, one in state.items()}
    dcp.load(wanted, storage_reader=reader(tmp_path))
    for name, one in state.items():
        expected = one.detach().resolve_conj().resolve_neg().contiguous()
        assert wanted[name].view(torch.uint8).equal(expected.view(torch.uint8)), name
