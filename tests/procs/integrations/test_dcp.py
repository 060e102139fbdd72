"""torch's own ``dcp.save`` and ``dcp.load`` write and read our files, on any number of ranks."""

from __future__ import annotations

import datetime
import io
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import remesh
from remesh.cli import main
from remesh.integrations.dcp import DcpReader, DcpWriter, Pickles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


def _state(placements: tuple[object, ...], *, fill: bool = True) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    whole = torch.randn(13, 6)
    state = {
        "model": {"w": distribute_tensor(whole, mesh, placements), "b": torch.arange(5.0), "n": torch.tensor(7)},
        "list": [torch.ones(2, dtype=torch.bfloat16), {"deep": 3}],
        "step": 11,
        "name": "run",
    }
    if not fill:
        for tensor in (state["model"]["w"].to_local(), state["model"]["b"], state["model"]["n"], state["list"][0]):
            tensor.zero_()
        state |= {"step": 0, "name": ""}
    return state


def _save(path: Path, writer: type[dcp.StorageWriter] = DcpWriter) -> list[str]:
    dcp.save(_state((Shard(0),)), storage_writer=writer(path))
    return sorted(os.listdir(path))


def _load(path: Path, reader: type[dcp.StorageReader] = DcpReader) -> bool:
    wanted, expected = _state((Shard(1),), fill=False), _state((Shard(1),))
    dcp.load(wanted, storage_reader=reader(path))
    return _equal(wanted, expected)


def _load_plain(path: Path) -> bool:
    wanted, expected = _state((Shard(1),), fill=False), _state((Shard(1),))
    return _equal(remesh.load(wanted, path), expected)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, DTensor):
        return torch.equal(one.full_tensor(), other.full_tensor())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_dcp_saves_with_ours_is_loaded_by_all_readers_on_another_number_of_ranks(ranks, tmp_path, num_ranks):
    names = ranks.run(_save, world_size=2, args=(tmp_path / "c",))[0]
    assert {".metadata", ".remesh-index", ".remesh-checksums"} <= set(names) and len(names) == 5
    for load, readers in ((_load, (DcpReader,)), (_load, (dcp.FileSystemReader,)), (_load_plain, ())):
        assert all(ranks.run(load, world_size=num_ranks, args=(tmp_path / "c", *readers))), readers


def test_what_torch_has_written_is_loaded_by_ours(ranks, tmp_path):
    ranks.run(_save, world_size=3, args=(tmp_path / "c", dcp.FileSystemWriter))
    assert all(ranks.run(_load, world_size=2, args=(tmp_path / "c",)))


def _async_save(path: Path, kind: str) -> bool:
    pair = dist.new_group(backend="gloo")
    state = _state((Shard(0),))
    future = dcp.async_save(
        state,
        storage_writer=DcpWriter(path),
        process_group=pair,
        async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType(kind),
    )
    state["model"]["w"].to_local().fill_(-1)  # after staging the state is the program's again
    future.result()
    return (path / ".metadata").exists()


def test_an_async_save_by_a_thread_is_the_same_checkpoint(ranks, tmp_path):
    assert all(ranks.run(_async_save, world_size=2, args=(tmp_path / "c", "thread")))
    assert all(ranks.run(_load, world_size=3, args=(tmp_path / "c",)))


def _fail_on_the_last_rank(path: Path) -> str:
    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem):
            if dist.get_rank() == dist.get_world_size() - 1:
                raise OSError(28, "No space left on device")
            return super().resolve_data(write_item)

    with pytest.raises(dcp.api.CheckpointException) as failed:
        dcp.save(_state((Shard(0),)), storage_writer=DcpWriter(path), planner=Planner())
    assert "No space left" in str(failed.value)
    assert not (path / ".metadata").exists()
    dist.barrier()
    dcp.save(_state((Shard(0),)), storage_writer=DcpWriter(path))
    return sorted(os.listdir(path))


def test_a_save_that_fails_on_one_rank_leaves_nothing_and_the_next_one_clears_up(ranks, tmp_path):
    names = ranks.run(_fail_on_the_last_rank, world_size=2, args=(tmp_path / "c",))[0]
    assert len([name for name in names if name.endswith(".distcp")]) == 2
    assert not [name for name in names if "in-progress" in name or name.endswith(".1")]
    assert all(ranks.run(_load, world_size=1, args=(tmp_path / "c",)))


def _save_with_cached_plans(root: Path) -> None:
    for step in range(3):
        state = _state((Shard(0),))
        if step == 1:  # its first save is given up on
            (root / "1").mkdir(exist_ok=True)
            dist.barrier()
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=DcpWriter(root / str(step)), planner=planner)


def test_a_planner_that_takes_plans_out_of_its_cache_writes_each_checkpoint_for_itself(ranks, tmp_path):
    ranks.run(_save_with_cached_plans, world_size=2, args=(tmp_path,))
    for step in range(3):
        assert all(ranks.run(_load, world_size=1, args=(tmp_path / str(step),)))


def test_in_one_process_without_a_group(tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "empty": torch.empty(0, 4), "when": [1, 2]}
    dcp.save(state, storage_writer=DcpWriter(), checkpoint_id=tmp_path / "c")
    wanted = {"w": torch.zeros(2, 3, dtype=torch.float64), "empty": torch.empty(0, 4), "when": []}
    dcp.load(wanted, storage_reader=DcpReader(), checkpoint_id=tmp_path / "c")
    assert wanted["w"].equal(state["w"].double()) and wanted["when"] == [1, 2]


def test_a_backward_pass_through_what_was_loaded_over_is_refused(tmp_path):
    weight = torch.ones(3, requires_grad=True)
    dcp.save({"w": torch.zeros(3)}, storage_writer=DcpWriter(tmp_path / "c"))
    loss = (weight * weight).sum()
    dcp.load({"w": weight}, storage_reader=DcpReader(tmp_path / "c"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _load_into_a_read_only_map(path: Path) -> str:
    """One tensor that rank 1 maps read-only: torch raises on both what rank 1 says, by name, and no process dies."""
    state = {"v": torch.zeros(4)}
    if dist.get_rank() == 1:
        (path.parent / "raw").write_bytes(bytes(16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of memory that is not writable
            state["v"] = torch.from_numpy(np.memmap(path.parent / "raw", np.float32, mode="r"))
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.load(state, storage_reader=DcpReader(path))
    assert list(raised.value.failures) == [1]
    return str(raised.value)


def test_a_read_only_map_is_refused_by_name_on_all_ranks(ranks, tmp_path):
    dcp.save({"v": torch.ones(4)}, storage_writer=DcpWriter(tmp_path / "c"))
    for said in ranks.run(_load_into_a_read_only_map, 2, (tmp_path / "c",)):
        assert "filling tensor 'v': its memory can only be read" in said


def test_a_target_whose_elements_share_memory_is_refused_and_one_that_shows_its_conjugate_is_filled(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 1j])
    dcp.save({"v": values}, storage_writer=DcpWriter(tmp_path / "c"))
    with pytest.raises(dcp.api.CheckpointException, match="'v': its elements overlap in memory"):
        dcp.load({"v": torch.zeros(1, dtype=torch.complex64).expand(2)}, storage_reader=DcpReader(tmp_path / "c"))
    shown = torch.zeros(2, dtype=torch.complex64).conj()
    dcp.load({"v": shown}, storage_reader=DcpReader(tmp_path / "c"))
    assert shown.equal(values)


def test_a_complete_checkpoint_is_not_written_over(tmp_path):
    dcp.save({"w": torch.ones(2)}, storage_writer=DcpWriter(tmp_path))
    with pytest.raises(dcp.api.CheckpointException, match="already holds a checkpoint of native torch"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=DcpWriter(tmp_path))
    assert remesh.load({"w": torch.zeros(2)}, tmp_path)["w"].equal(torch.ones(2))


class _Strange:
    """Whatever unpickles it runs this."""

    def __reduce__(self):
        return os.putenv, ("REMESH_STRANGE", "1")


def test_a_value_that_could_not_be_read_back_safely_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match=r"'x'.*could not be loaded again"):
        dcp.save({"x": _Strange()}, storage_writer=DcpWriter(tmp_path))


def test_a_value_that_runs_code_is_refused_when_it_is_loaded_unless_that_is_asked_for(tmp_path):
    when = datetime.UTC
    dcp.save({"x": when}, storage_writer=DcpWriter(tmp_path, pickles=Pickles.ANY))
    with pytest.raises(dcp.api.CheckpointException, match="not known to be safe"):
        dcp.load({"x": None}, storage_reader=DcpReader(tmp_path))
    wanted = {"x": None}
    dcp.load(wanted, storage_reader=DcpReader(tmp_path, pickles=Pickles.ANY))
    assert wanted["x"] == when


class _TellingLoadPlanner(dcp.DefaultLoadPlanner):
    """Looks at bytes before torch's planner unpickles them."""

    def load_bytes(self, read_item, value):
        super().load_bytes(read_item, value)


def test_a_planner_that_hands_pickles_on_is_given_none_that_runs_code(tmp_path):
    dcp.save({"x": _Strange()}, storage_writer=DcpWriter(tmp_path, pickles=Pickles.ANY))
    with pytest.raises(dcp.api.CheckpointException, match="not known to be safe|could not be loaded"):
        dcp.load({"x": None}, storage_reader=DcpReader(tmp_path), planner=_TellingLoadPlanner())


class _RawSavePlanner(dcp.DefaultSavePlanner):
    """Writes bytes that are no pickle."""

    def resolve_data(self, write_item: WriteItem):
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(repr(self.lookup_object(write_item.index)).encode())
        return super().resolve_data(write_item)

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=metadata.planner_data | {"mine": ("yes", 3)})


class _RawLoadPlanner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        self.original_state_dict[read_item.dest_index.fqn] = value.read().decode()


def test_whatever_a_planner_gives_is_carried(tmp_path):
    dcp.save({"x": {1, 2}}, storage_writer=DcpWriter(tmp_path), planner=_RawSavePlanner())
    assert DcpReader(tmp_path).read_metadata().planner_data == {"x": ("x",), "mine": ("yes", 3)}
    wanted = {"x": ""}
    dcp.load(wanted, storage_reader=DcpReader(tmp_path), planner=_RawLoadPlanner())
    assert wanted["x"] == "{1, 2}"


def test_the_index_tells_where_everything_lies_as_that_of_torch_does(tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "n": {"step": 7}}
    dcp.save(state, storage_writer=DcpWriter(tmp_path), no_dist=True)
    ours, theirs = DcpReader(tmp_path).read_metadata(), FileSystemReader(tmp_path).read_metadata()
    assert ours.storage_data == theirs.storage_data
    assert {index.fqn for index in ours.storage_data} == {"w", "n.step"}


def test_planner_data_that_would_run_code_in_the_index_is_refused(tmp_path):
    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=_Strange())

    with pytest.raises(dcp.api.CheckpointException, match="correct the planner"):
        dcp.save({"x": 1}, storage_writer=DcpWriter(tmp_path), planner=Planner())
    assert not (tmp_path / ".metadata").exists()


def test_a_tensor_that_is_not_as_planned_is_refused_by_name(tmp_path):
    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item).half()

    with pytest.raises(dcp.api.CheckpointException, match=r"tensor 'w'.*float16.*expected torch.float32"):
        dcp.save({"w": torch.ones(2)}, storage_writer=DcpWriter(tmp_path), planner=Planner())


def test_an_index_that_runs_code_is_not_unpickled(tmp_path):
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Strange()))
    with pytest.raises(dcp.api.CheckpointException, match="names posix.putenv"):
        dcp.load({"w": torch.ones(2)}, storage_reader=DcpReader(tmp_path))


def test_a_damaged_file_is_found_out(tmp_path):
    dcp.save({"w": torch.arange(50_000.0)}, storage_writer=DcpWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[100_000] ^= 1
    file.write_bytes(content)
    with pytest.raises(dcp.api.CheckpointException, match="checksum"):
        dcp.load({"w": torch.zeros(50_000)}, storage_reader=DcpReader(tmp_path))


def test_one_checkpoint_for_each_rank_is_refused(tmp_path):
    with pytest.raises(remesh.ConfigError, match="use_collectives=False"):
        DcpWriter(tmp_path).set_up_storage_writer(True, use_collectives=False)


def test_a_place_is_needed():
    with pytest.raises(remesh.ConfigError, match="no directory is given"):
        DcpReader().read_metadata()


def test_a_checkpoint_of_ours_is_refused_with_the_verb_that_converts_it(tmp_path):
    remesh.save({"w": torch.ones(2), "step": 3}, tmp_path / "c")
    with pytest.raises(dcp.api.CheckpointException, match="remesh ckpt convert"):
        dcp.load({"w": torch.zeros(2)}, storage_reader=DcpReader(tmp_path / "c"))
    main(["ckpt", "convert", str(tmp_path / "c"), str(tmp_path / "d"), "--to", "dcp"], standalone_mode=False)
    wanted = {"w": torch.zeros(2)}
    dcp.load(wanted, storage_reader=DcpReader(tmp_path / "d"))
    assert wanted["w"].equal(torch.ones(2))


def _train_and_save(path: Path) -> list[float]:
    return _losses(path, load=False)


def _load_and_train(path: Path) -> list[float]:
    return _losses(path, load=True)


def _losses(path: Path, *, load: bool) -> list[float]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if load:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, storage_reader=DcpReader(path))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = []
    for step in range(2 if load else 0, 4):
        loss = model(torch.full((8, 7), 0.1 * (step + 1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == 1:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.async_save(state, storage_writer=DcpWriter(path)).result()
    return losses


def test_training_goes_on_with_the_same_losses_on_another_number_of_ranks(ranks, tmp_path):
    before = ranks.run(_train_and_save, world_size=3, args=(tmp_path / "c",))[0]
    after = ranks.run(_load_and_train, world_size=2, args=(tmp_path / "c",))[0]
    assert after == pytest.approx(before[2:], rel=1e-5)
