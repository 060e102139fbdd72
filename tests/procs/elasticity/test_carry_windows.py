"""A mesh that is filled by windows gets what it would get at once, in less memory, whoever is lost meanwhile."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from remesh.checkpoint.storage import location_of
from remesh.comm.word_tree import Farewell
from remesh.elasticity.training import fill, window_fill
from remesh.elasticity.training.fill import Filled, FillRules, Offers, fill_state
from remesh.elasticity.training_state import CarriedState, HeldState
from remesh.foundation.errors import ConfigError, PeerError
from remesh.layout.from_torch import piece_of
from remesh.resharding.running.carry import Staging
from remesh.resharding.running.run import Moved, run_plan
from remesh.testbed.pool import RankPool

pytestmark = pytest.mark.procs

HOSTS = {0: "a", 1: "b", 2: "c"}
NUM_LAYERS, SIDE = 4, 12
ROW_BYTES = SIDE * 4
RULES = FillRules(window_bytes=SIDE * ROW_BYTES)
"""In a window two moments of one layer of which a rank has a third or a half."""


class Layers(nn.Module):
    """Squares with the same elements whenever they are made; cut over a mesh, if there is one."""

    def __init__(self, side: int, mesh: DeviceMesh | None = None, dim: int = 0) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(1)
        wholes = [torch.randn(side, side, generator=chance) for _ in range(NUM_LAYERS)]
        cut = wholes if mesh is None else [distribute_tensor(w, mesh, [Shard(dim)], src_data_rank=None) for w in wholes]
        self.layers = nn.ParameterList([nn.Parameter(one) for one in cut])


def stepped(side: int, mesh: DeviceMesh | None = None, dim: int = 0) -> CarriedState:
    """Such layers and their Adam after a step; all is element by element, so it is the same however it is cut."""
    model = Layers(side, mesh, dim)
    optim = torch.optim.Adam(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optim.step()
    optim.zero_grad(set_to_none=True)
    return CarriedState({"model": model, "optim": optim})


def fresh(side: int, mesh: DeviceMesh, dim: int) -> CarriedState:
    model = Layers(side, mesh, dim)
    return CarriedState({"model": model, "optim": torch.optim.Adam(model.parameters(), lr=0.1)})


def held_by_first_two(side: int = SIDE) -> HeldState | None:
    """The state in rows of the first two ranks, at step 12; the third is new."""
    mesh = DeviceMesh("cpu", [0, 1])
    return stepped(side, mesh).hold(12, 120, 0) if dist.get_rank() < 2 else None


def is_as_expected(state: CarriedState, side: int = SIDE) -> bool:
    """Whether every rank's part of every tensor has the values of one process."""
    expected = stepped(side)
    wholes = expected.tensors()
    for name, piece in state.pieces().items():
        for shard in piece.shards:
            mine = piece.tensor.as_strided(shard.box.shape, shard.strides or (), shard.offset)
            if not torch.equal(mine, wholes[name][shard.box.slices()]):
                return False
    return state.tensors().keys() == wholes.keys() and state.values() == expected.values()


def fill_columns() -> tuple[Filled, bool, int]:
    state, held = fresh(SIDE, DeviceMesh("cpu", [0, 1, 2]), 1), held_by_first_two()
    filled = fill_state(state, Offers(held), HOSTS, RULES)
    assert state.in_doubt is None and not state.is_torn
    left = 0 if held is None else sum(piece.tensor.numel() for piece in held.pieces.values() if piece.tensor.dim() > 1)
    return filled, is_as_expected(state), left


def test_a_new_mesh_gets_by_windows_what_one_process_has(ranks: RankPool) -> None:
    for filled, is_right, _ in ranks.run(fill_columns, 3):
        assert is_right
        assert (filled.source, filled.position.step, filled.position.samples) == ("peers", 12, 120)
        assert filled.num_windows == NUM_LAYERS, (
            "parameters with the moments of one layer, then the others by themselves"
        )


def live_tensors() -> list[torch.Tensor]:
    """All that this process has."""
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not isinstance(one, DTensor)]


def live_bytes() -> int:
    """Of all memory of tensors that this process has."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in live_tensors()}.values())


def fill_and_look(window_bytes: int | None) -> tuple[int, int]:
    """Old rows and new columns of both ranks: what was alive at the most as something moved, and what was planned."""
    mesh, alive = DeviceMesh("cpu", [0, 1]), []
    others = live_tensors()  # of earlier tests: a thread that lets go of one meanwhile must not count
    before = live_bytes()
    held = stepped(SIDE, mesh).hold(12, 120, 0)
    state = fresh(SIDE, mesh, 1)
    room = window_fill if window_bytes is not None else fill

    def look(*args: Any) -> Moved:
        moved = run_plan(*args)
        alive.append(live_bytes() - before)
        return moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "run_plan", look)
        filled = fill_state(state, Offers(held), {0: "a", 1: "b"}, FillRules(window_bytes=window_bytes))
    assert is_as_expected(state)
    del others
    return max(alive), filled.peak_bytes


def test_beside_the_old_state_and_new_parameters_a_window_is_held_and_no_second_state(ranks: RankPool) -> None:
    share = SIDE * ROW_BYTES // 2
    old, parameters, window = 3 * NUM_LAYERS * share, NUM_LAYERS * share, 2 * share
    counters = 2 * NUM_LAYERS * 4
    """Adam's steps, old and new."""
    for alive, planned in ranks.run(fill_and_look, 2, (window,)):
        assert old + parameters < alive <= planned <= old + parameters + window + counters
    for alive, _ in ranks.run(fill_and_look, 2, (None,)):
        assert alive >= 2 * old, "at once"


def lose_the_end_of_a_window(lost: int, number: int, folder: str) -> tuple[str, bool]:
    """Rank ``lost`` does not hear that a window is over, for who would tell is gone; then all fill once more."""
    rank = dist.get_rank()
    state, held = fresh(SIDE, DeviceMesh("cpu", [0, 1, 2]), 1), held_by_first_two()
    real, ends = Farewell.wait, []

    def wait(farewell: Farewell, trouble: bool = False) -> bool:
        met_with_trouble = real(farewell, trouble)
        ends.append(1)
        if rank == lost and len(ends) == number:
            raise RuntimeError("Connection closed by peer")
        if len(ends) == number + 1:
            raise RuntimeError("Connection closed by peer")
        return met_with_trouble

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PeerError):
        patch.setattr(Farewell, "wait", wait)
        fill_state(state, Offers(held), HOSTS, RULES)
    kept = state.in_doubt or held
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=3)
    again = fresh(SIDE, DeviceMesh("cpu", [2, 0, 1]), 0)
    filled = fill_state(again, Offers(kept), HOSTS, RULES)
    return filled.source, is_as_expected(again)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("lost", range(3))
def test_between_two_windows_old_and_new_shards_together_are_the_state(
    ranks: RankPool, tmp_path: Path, lost: int, number: int
) -> None:
    assert ranks.run(lose_the_end_of_a_window, 3, (lost, number, str(tmp_path))) == [("peers", True)] * 3


def fill_with_windows_of_their_own() -> str:
    state, held = fresh(SIDE, DeviceMesh("cpu", [0, 1, 2]), 1), held_by_first_two()
    with pytest.raises(ConfigError) as raised:
        fill_state(state, Offers(held), HOSTS, FillRules(window_bytes=1 << (10 + dist.get_rank())))
    assert held is None or len(held.pieces) > NUM_LAYERS
    return str(raised.value)


def test_windows_that_differ_are_refused_on_all_ranks(ranks: RankPool) -> None:
    told = ranks.run(fill_with_windows_of_their_own, 3)
    assert len(set(told)) == 1
    assert "window_bytes is 1024 on rank 0 and 2048 on rank 1" in told[0]


def fill_without_a_moment(folder: str) -> tuple[str, int]:
    """Half of one moment is lost: no window moves, and the job begins anew as it would at once."""
    state, held = fresh(SIDE, DeviceMesh("cpu", [0, 1, 2]), 1), held_by_first_two()
    if dist.get_rank() == 1 and held is not None:
        del held.pieces["optim.state.model.layers.2.exp_avg"]
    before = 0 if held is None else len(held.pieces)
    rules = FillRules(location_of(folder), save_every=100, line=4, window_bytes=RULES.window_bytes)
    filled = fill_state(state, Offers(held), HOSTS, rules)
    return filled.source, before - (0 if held is None else len(held.pieces))


def test_where_a_moment_has_no_holder_nothing_is_given_up(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(fill_without_a_moment, 3, (str(tmp_path),)) == [("fresh", 0)] * 3


def fill_from_memory_and_snapshots() -> bool:
    """Rank 1 was replaced; what it held lies in a snapshot of the same step on the node of rank 2."""
    mesh = DeviceMesh("cpu", [0, 1])
    rank = dist.get_rank()
    own = stepped(SIDE, mesh).hold(12, 120, 0) if rank < 2 else None
    lost = own if rank == 1 else None
    pieces = {name: piece_of(piece.tensor) for name, piece in lost.pieces.items()} if lost is not None else {}
    assert all(one.tensor.numel() for one in pieces.values())
    state = fresh(SIDE, DeviceMesh("cpu", [0, 1, 2]), 1)
    offers = Offers(None, (lost,)) if lost is not None else Offers(own, () if own is None else (own,))
    fill_state(state, offers, HOSTS, RULES)
    return is_as_expected(state)


def test_snapshots_of_the_newest_step_fill_windows_too(ranks: RankPool) -> None:
    assert ranks.run(fill_from_memory_and_snapshots, 3) == [True] * 3


def run_out_of_memory(where: str, folder: str) -> tuple[str, bool, bool]:
    """Rank 1 has no room for the moments of the third window, or for its messages; then all fill another mesh."""
    rank = dist.get_rank()
    state, held = fresh(SIDE, DeviceMesh("cpu", [0, 1, 2]), 1), held_by_first_two()
    num_calls, room = [0], {"moments": CarriedState, "staging": Staging}[where]
    name = {"moments": "make", "staging": "_allocate"}[where]
    real = getattr(room, name)

    def refuse(self: Any, *args: Any) -> Any:
        num_calls[0] += where == "moments"
        if num_calls[0] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(self, *args)

    def count(*args: Any) -> Moved:
        num_calls[0] += where == "staging"
        return run_plan(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises((ConfigError, PeerError, RuntimeError)) as raised:
        patch.setattr(window_fill, "run_plan", count)
        if rank == 1:
            patch.setattr(room, name, refuse)
        fill_state(state, Offers(held), HOSTS, RULES)
    lr = state._optims["optim"].param_groups[0]["lr"]
    kept = state.in_doubt or held
    if where == "staging":  # in the middle of messages: this group is of no use
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=3)
    again = fresh(SIDE, DeviceMesh("cpu", [2, 0, 1]), 0)
    fill_state(again, Offers(kept), HOSTS, RULES)
    told = "peer" if isinstance(raised.value, PeerError) else str(raised.value)
    return told, is_as_expected(again), lr == 0.1 and state.in_doubt is not None


def test_moments_without_memory_in_a_later_window_are_told_on_all_ranks_and_nothing_is_lost(
    ranks: RankPool, tmp_path: Path
) -> None:
    told = ranks.run(run_out_of_memory, 3, ("moments", str(tmp_path)))
    assert len(set(told)) == 1 and told[0][1:] == (True, True)
    assert "no memory left for its part of the state (CUDA out of memory" in told[0][0] and "rank 1" in told[0][0]


def test_staging_without_memory_in_a_later_window_loses_a_peer_and_nothing_else(
    ranks: RankPool, tmp_path: Path
) -> None:
    told = ranks.run(run_out_of_memory, 3, ("staging", str(tmp_path)))
    assert [one[1:] for one in told] == [(True, True)] * 3
    assert [one[0] for one in told] == ["peer", "CUDA out of memory. Tried to allocate 20.00 MiB.", "peer"]
