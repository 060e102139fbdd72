"""Objects that keep a state dict are saved and restored by it, and keys that are asked for have to be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointingException, CheckpointMismatchError
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what torch says in one process


class Counter:
    """A program's own object, as torch's `Stateful` wants it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "inner": [self.count, {"twice": 2 * self.count}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["inner"][1]["twice"] == 2 * self.count


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "own": {"counter": Counter(seed)}, "step": seed}


def flat(state: dict[str, Any]) -> list[Any]:
    tensors = [*state["model"].state_dict().values()]
    for of_parameter in state["optimizer"].state_dict()["state"].values():
        tensors += of_parameter.values()
    return [one.tolist() for one in tensors] + [state["optimizer"].param_groups[0]["lr"], state["own"]["counter"].count]


def test_modules_optimizers_and_own_objects_inside_a_state_come_back(tmp_path: Path) -> None:
    saved, other = training(1), training(2)
    remesh.save(saved, tmp_path)
    assert flat(other) != flat(saved)
    loaded = remesh.load(other, tmp_path)
    assert flat(other) == flat(saved)
    assert loaded["model"] is other["model"] and loaded["own"]["counter"] is other["own"]["counter"]
    assert loaded["step"] == 1


def test_what_native_torch_saved_of_a_module_comes_back(tmp_path: Path) -> None:
    saved, other = training(1)["model"], training(2)["model"]
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    remesh.load({"model": other}, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters(), strict=True))


def test_native_torch_reads_what_was_saved_of_a_module(tmp_path: Path) -> None:
    saved, other = training(1)["model"], training(2)["model"]
    remesh.save({"model": saved}, tmp_path)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters(), strict=True))


def test_an_object_without_a_place_for_what_is_stored_is_refused(tmp_path: Path) -> None:
    remesh.save(training(1), tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = [one.tolist() for one in model.state_dict().values()]

    class OfALibrary(torch.optim.AdamW):
        """Its steps may do anything, so no load makes one."""

    with pytest.raises(CheckpointMismatchError, match=r"'optimizer': its state_dict\(\) has no place for 12 tensors"):
        remesh.load({"model": model, "optimizer": OfALibrary(model.parameters())}, tmp_path)
    model(torch.ones(2, 3)).sum().backward()  # gradients that a step would use
    before = [one.tolist() for one in model.state_dict().values()]
    with pytest.raises(CheckpointMismatchError, match=r"'optimizer': its state_dict\(\) has no place for 12 tensors"):
        remesh.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, tmp_path)
    assert [one.tolist() for one in model.state_dict().values()] == before


def test_an_object_that_cannot_take_its_state_back_is_refused(tmp_path: Path) -> None:
    class GivesOnly:
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(CheckpointMismatchError, match="a GivesOnly has state_dict.. and no load_state_dict"):
        remesh.save({"a": GivesOnly()}, tmp_path)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"modle": {}}, "'modle'; did you mean 'model'"),
        ({"model": {"lyaers": 1}}, "'model.lyaers'; did you mean 'model.layers'"),
        ({"stepp": 0, "model": {}}, "'stepp'; did you mean 'step'"),
        ({"model": {"w": [torch.zeros(2)]}}, "did you mean"),
        ({"zzz": None, "yyy": 1, "xxx": 2, "vvv": 3}, r"4 keys .* 'zzz', 'yyy', 'xxx', \.\.\.; ask for what was saved"),
    ],
)
def test_keys_that_are_not_stored_are_told_with_the_nearest(tmp_path: Path, asked: dict[str, Any], told: str) -> None:
    remesh.save({"model": {"w": torch.ones(2), "layers": 3}, "step": 7}, tmp_path)
    with pytest.raises(CheckpointMismatchError, match=told):
        remesh.load(asked, tmp_path)
    assert remesh.load({"model": {"layers": 0}, "step": 0}, tmp_path) == {"model": {"layers": 3}, "step": 7}


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (torch.zeros(4, 4, device="meta"), "on the device meta, without values"),
        (torch.zeros(1, 4).expand(4, 4), "elements overlap in memory"),
        (torch.zeros(4, 4).to_sparse(), "of layout torch.sparse_coo"),
        (
            Piece(torch.zeros(8), (4, 4), (Shard(0, Box((0, 0), (2, 4))), Shard(0, Box((2, 0), (4, 4))))),
            "overlap in memory from offset 0",
        ),
    ],
)
def test_memory_that_cannot_be_filled_is_refused(tmp_path: Path, wanted: Any, told: str) -> None:
    remesh.save({"w": torch.ones(4, 4)}, tmp_path)
    with pytest.raises(CheckpointMismatchError, match=told):
        remesh.load({"w": wanted}, tmp_path)


def test_an_expanded_tensor_can_be_saved(tmp_path: Path) -> None:
    remesh.save({"w": torch.arange(4.0).expand(3, 4)}, tmp_path)
    assert remesh.load({"w": torch.zeros(3, 4)}, tmp_path)["w"].tolist() == [[0, 1, 2, 3]] * 3


def test_what_may_be_absent_keeps_its_value_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remesh.save({"a": torch.ones(2), "inner": {"step": 3}}, tmp_path / "c")
    wanted = {"a": torch.zeros(2), "b": torch.full((2,), 5.0), "inner": {"step": 0, "more": {"x": 1}}, "k": [1, 2]}
    found = remesh.load(wanted, tmp_path / "c", strict=False)
    assert found["a"].tolist() == [1, 1] and found["b"] is wanted["b"] and found["b"].tolist() == [5, 5]  # type: ignore[attr-defined]
    assert (found["inner"], found["k"]) == ({"step": 3, "more": {"x": 1}}, [1, 2])
    assert "3 keys are not in it and keep their values, 'b', 'inner.more.x', 'k'" in caplog.text


def test_what_may_be_absent_has_to_fit_where_it_is_there(tmp_path: Path) -> None:
    remesh.save({"a": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(CheckpointMismatchError, match="shape"):
        remesh.load({"a": torch.zeros(3)}, tmp_path / "c", strict=False)


def test_a_module_that_has_grown_takes_what_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    remesh.save({"model": small}, tmp_path / "small")
    grown = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    before = grown[2].weight.detach().clone()
    remesh.load({"model": grown}, tmp_path / "small", strict=False)
    assert torch.equal(grown[1].weight, small[1].weight) and torch.equal(grown[2].weight, before)
    assert "2 keys are not in it and keep their values, 'model.2.weight', 'model.2.bias'" in caplog.text

    remesh.save({"model": grown}, tmp_path / "grown")
    with pytest.raises(CheckpointMismatchError, match="has no place for 2 tensors"):
        remesh.load({"model": small}, tmp_path / "grown")
    remesh.load({"model": small}, tmp_path / "grown", strict=False)
    assert (
        "object 'model' has no place for 2 tensors, which are left out, 'model.2.bias', 'model.2.weight'" in caplog.text
    )


class Packed(torch.nn.Module):
    """Reads in the version beside its state dict in which form that is, as torch's quantized modules do."""

    _version = 3

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value))
        self.read: list[int | None] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        self.read.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


@pytest.mark.parametrize("strict", [True, False])
def test_modules_are_given_the_versions_that_belong_to_their_state_dict(tmp_path: Path, strict: bool) -> None:
    remesh.save({"model": torch.nn.Sequential(Packed(5.0)), "all": [torch.nn.Sequential(Packed(6.0))]}, tmp_path)
    model, listed = torch.nn.Sequential(Packed(0.0)), torch.nn.Sequential(Packed(0.0))
    remesh.load({"model": model, "all": [listed]}, tmp_path, strict=strict)
    state: dict[str, Any] = {"model": torch.nn.Sequential(Packed(0.0)).state_dict()}
    by_hand = torch.nn.Sequential(Packed(0.0))
    by_hand.load_state_dict(remesh.load(state, tmp_path, strict=strict)["model"])
    for one, value in ((model[0], 5.0), (listed[0], 6.0), (by_hand[0], 5.0)):
        assert one.read == [3] and one.weight.tolist() == [value, value]  # type: ignore[union-attr]


def test_a_module_whose_state_has_no_tensors_is_given_its_versions(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        level = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"level": self.level}

        def set_extra_state(self, state: Any) -> None:
            self.level = state["level"]

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
            assert local_metadata == {"version": 1}
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)

    saved, loaded = Plain(), Plain()
    saved.level = 7
    remesh.save({"model": saved}, tmp_path)
    remesh.load({"model": loaded}, tmp_path)
    assert loaded.level == 7


def test_two_keys_of_one_name_in_a_checkpoint_of_native_torch_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": {"b": 5}, "w": torch.ones(2)}, checkpoint_id=tmp_path / "native")
    assert remesh.load({"a": {"b": 0}}, tmp_path / "native")["a"] == {"b": 5}
    asked: list[dict[Any, Any]] = [{"a": {"b": 0}, "a.b": 0}, {"a.b": 0, "a": {"b": {}}}]
    for one in asked:
        for strict in (True, False):
            with pytest.raises(CheckpointMismatchError, match="two values are asked for under the name 'a.b'"):
                remesh.load(one, tmp_path / "native", strict=strict)
    remesh.save({"a": {"b": 5}, "a.b": 6}, tmp_path / "own")
    assert remesh.load({"a": {"b": 0}, "a.b": 0}, tmp_path / "own") == {"a": {"b": 5}, "a.b": 6}, "two places there"


def test_a_key_that_is_nan_is_refused_at_save(tmp_path: Path) -> None:
    for state in ({"d": {float("nan"): 1}}, {"d": [{float("nan"): torch.ones(1)}]}):
        with pytest.raises(CheckpointMismatchError, match=r"there is a key d\.(0\.)?nan, and NaN equals no other key"):
            remesh.save(state, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_files_of_other_programs_are_told_with_the_verb_that_makes_a_checkpoint_of_them(tmp_path: Path) -> None:
    file = tmp_path / "hf" / "model.safetensors"
    file.parent.mkdir()
    save_file({"w": torch.ones(2)}, file)
    for place, load in ((file.parent, dist_checkpointing.load_plain_tensors), (file, lambda at: remesh.load({}, at))):
        with pytest.raises(CheckpointingException, match=f"remesh ckpt convert {place} TARGET --to torch_dist"):
            load(place)
    writer = FileSystemWriter(tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    with pytest.raises(
        CheckpointingException, match=r"another format, such as torch's SerializationFormat\.SAFETENSORS"
    ):
        remesh.load({"w": torch.zeros(2)}, tmp_path / "dcp")
