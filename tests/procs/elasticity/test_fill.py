"""Where state comes from when a spare takes a seat: what it has at hand, and what it has to be given."""

from __future__ import annotations

import importlib
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from remesh.checkpoint.plain import save
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.storage import location_of
from remesh.comm.word_tree import Farewell
from remesh.elasticity.training.fill import Filled, FillRules, Offers, fill_state
from remesh.elasticity.training.position import Position
from remesh.elasticity.training_state import POSITION, CarriedState, HeldState
from remesh.elasticity.typed_values import encode
from remesh.foundation.errors import ConfigError, PeerError, StorageError
from remesh.layout.from_torch import piece_of
from remesh.resharding.planning.planner import plan_reshard
from remesh.testbed.pool import RankPool, RanksFailed

pytestmark = pytest.mark.procs
HOSTS = {0: "a", 1: "b", 2: "c"}
SIZE = 30


def held(step: int, tensor: torch.Tensor, line: int = 0) -> HeldState:
    return HeldState(step, 10 * step, {"w": piece_of(tensor)}, {}, line)


def where(filled: Filled) -> tuple[int, int, int]:
    return filled.position.step, filled.position.samples, filled.position.line


def fill_from_replicas() -> tuple[Filled, float]:
    """Ranks 0 and 1 hold step 12; the spare on rank 2 has a whole snapshot of step 10."""
    old, new = torch.full((SIZE,), 10.0), torch.full((SIZE,), 12.0)
    wanted = torch.zeros(SIZE)
    offers = Offers(None, (held(10, old),)) if dist.get_rank() == 2 else Offers(held(12, new), (held(10, old),))
    filled = fill_state(CarriedState({"w": wanted}), offers, HOSTS, FillRules())
    return filled, float(wanted.sum())


def fill_from_shelves() -> tuple[Filled, float]:
    """A third of the state died. Every rank has its own seat's snapshot, the spare on rank 2 that of the dead."""
    mesh = init_device_mesh("cpu", (3,))
    old, new = (
        distribute_tensor(torch.full((SIZE,), step), mesh, [Shard(0)], src_data_rank=None) for step in (10.0, 12.0)
    )
    wanted: DTensor = distribute_tensor(torch.zeros(SIZE), mesh, [Shard(0)], src_data_rank=None)
    offers = Offers(held(12, new) if dist.get_rank() < 2 else None, (held(10, old),))
    filled = fill_state(CarriedState({"w": wanted}), offers, HOSTS, FillRules())
    return filled, float(wanted.to_local().sum())


def fill_after_a_loss(step: int, folder: str) -> tuple[Filled, float, bool]:
    """A third of the state died, nobody keeps snapshots, and the folder of checkpoints is empty."""
    mesh = init_device_mesh("cpu", (3,))
    old = distribute_tensor(torch.full((SIZE,), 7.0), mesh, [Shard(0)], src_data_rank=None)
    layer = torch.nn.Linear(SIZE, 1)
    made: DTensor = distribute_tensor(torch.ones(SIZE), mesh, [Shard(0)], src_data_rank=None)
    state = CarriedState({"w": made, "layer": layer, "optim": (optim := torch.optim.AdamW(layer.parameters()))})
    pieces = {"w": piece_of(old), "optim.state.layer.weight.exp_avg": piece_of(torch.ones(1, SIZE))}
    survivor = HeldState(step, 10 * step, pieces, {}) if dist.get_rank() < 2 else None
    rules = FillRules(location_of(folder), save_every=10, line=4)
    filled = fill_state(state, Offers(survivor), HOSTS, rules)
    return filled, float(made.to_local().sum()), bool(optim.state)


def fill_from_two_lines() -> tuple[Filled, float]:
    """Step 10 was made twice: rank 0 keeps its third of one line, the others theirs of both."""
    mesh = init_device_mesh("cpu", (3,))
    first, second = (
        distribute_tensor(torch.full((SIZE,), value), mesh, [Shard(0)], src_data_rank=None) for value in (1.0, 2.0)
    )
    wanted: DTensor = distribute_tensor(torch.zeros(SIZE), mesh, [Shard(0)], src_data_rank=None)
    later = (held(10, second, 3),) if dist.get_rank() > 0 else ()
    filled = fill_state(CarriedState({"w": wanted}), Offers(None, (held(10, first, 1), *later)), HOSTS, FillRules())
    return filled, float(wanted.to_local().sum())


def fill_from_own(steps: list[int]) -> tuple[Filled, float, int]:
    """Each rank holds its third of a tensor, and a layer with its optimizer, at its step; how often ranks planned."""
    mesh = init_device_mesh("cpu", (3,))
    step = steps[dist.get_rank()]
    old: DTensor = distribute_tensor(torch.full((SIZE,), float(step)), mesh, [Shard(0)], src_data_rank=None)
    layer = torch.nn.Linear(SIZE, 1)
    optim = torch.optim.AdamW(layer.parameters(), lr=0.5)
    layer(torch.ones(SIZE)).backward()
    optim.step()
    optim.zero_grad()
    held = CarriedState({"w": old, "layer": layer, "optim": optim}).hold(step, 10 * step, 0)
    wanted: DTensor = distribute_tensor(torch.zeros(SIZE), mesh, [Shard(0)], src_data_rank=None)
    copy = torch.nn.Linear(SIZE, 1)
    state = CarriedState({"w": wanted, "layer": copy, "optim": (fresh := torch.optim.AdamW(copy.parameters()))})
    num_plans = 0

    def plan(*arguments: object) -> object:
        nonlocal num_plans
        num_plans += 1
        return plan_reshard(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remesh.elasticity.training.fill.plan_reshard", plan)
        filled = fill_state(state, Offers(held), HOSTS, FillRules(location_of("nowhere"), save_every=100, line=4))
    if filled.source == "peers":
        assert torch.equal(copy.weight, layer.weight)
        assert torch.equal(fresh.state[copy.weight]["exp_avg"], optim.state[layer.weight]["exp_avg"])
        assert fresh.param_groups[0]["lr"] == 0.5
    return filled, float(wanted.to_local().sum()), num_plans


def fill_around_moments_of_an_older_step() -> tuple[Filled, float, bool]:
    """Rank 0 was left at step 10 with an optimizer's moments, the others went on to 12 without."""
    layer = torch.nn.Linear(SIZE, 1)
    optim = torch.optim.AdamW(layer.parameters())
    value = 10.0 if dist.get_rank() == 0 else 12.0
    pieces = {name: piece_of(torch.full_like(one, value)) for name, one in layer.state_dict(prefix="layer.").items()}
    if dist.get_rank() == 0:
        pieces |= {f"optim.state.{name}.exp_avg": piece for name, piece in pieces.items()}
        pieces |= {f"optim.state.{name}.exp_avg_sq": pieces[name] for name in ("layer.weight", "layer.bias")}
        pieces |= {f"optim.state.{name}.step": piece_of(torch.tensor(9.0)) for name in ("layer.weight", "layer.bias")}
    values = {"optim.param_groups": encode("optim.param_groups", [{"lr": 0.5}])}
    state = CarriedState({"layer": layer, "optim": optim})
    filled = fill_state(state, Offers(HeldState(int(value), 0, pieces, values)), HOSTS, FillRules())
    return filled, float(layer.weight.detach().mean()), bool(optim.state)


def test_survivors_newer_replicas_come_before_what_a_spare_has_at_hand(ranks: RankPool) -> None:
    for filled, total in ranks.run(fill_from_replicas, 3):
        assert (filled.source, filled.position.step) == ("peers", 12)
        assert {taker for _, taker in filled.bytes_by_pair} == {2}
        assert sum(filled.bytes_by_pair.values()) == 4 * SIZE
        assert total == 12.0 * SIZE


def test_a_rank_knows_what_it_took_from_whom(ranks: RankPool) -> None:
    first, second, spare = (dict(filled.bytes_taken) for filled, _ in ranks.run(fill_from_replicas, 3))
    assert first == second == {}
    assert spare.keys() <= {0, 1}
    assert sum(spare.values()) == 4 * SIZE


def test_going_back_moves_nothing_when_everybody_has_its_own_seats_snapshot(ranks: RankPool) -> None:
    for filled, total in ranks.run(fill_from_shelves, 3):
        assert (filled.source, filled.position.step) == ("snapshots", 10)
        assert filled.bytes_by_pair == {}
        assert filled.bytes_kept == 4 * SIZE
        assert total == 10.0 * SIZE / 3


def test_nothing_is_planned_where_every_rank_holds_what_it_needs(ranks: RankPool) -> None:
    for filled, total, num_plans in ranks.run(fill_from_own, 3, ([12, 12, 12],)):
        assert (filled.source, where(filled)) == ("peers", (12, 120, 0))
        assert (filled.bytes_by_pair, filled.bytes_taken, num_plans) == ({}, {}, 0)
        tensors_bytes = 4 * SIZE + 3 * 4 * 3 * (SIZE + 1) + 3 * 2 * 4
        assert filled.bytes_kept == tensors_bytes
        assert total == 12.0 * SIZE / 3


def test_thirds_of_different_steps_are_not_kept_together(ranks: RankPool) -> None:
    for filled, total, _ in ranks.run(fill_from_own, 3, ([12, 12, 10],)):
        assert filled.source == "fresh"
        assert total == 0.0


def test_moments_of_an_older_step_leave_no_trace(ranks: RankPool) -> None:
    for filled, mean, has_moments in ranks.run(fill_around_moments_of_an_older_step, 3):
        assert (filled.source, filled.position.step) == ("peers", 12)
        assert (mean, has_moments) == (12.0, False)


def test_a_job_that_loses_a_box_before_its_first_checkpoint_is_due_begins_anew(ranks: RankPool, tmp_path: Path) -> None:
    for filled, total, has_moments in ranks.run(fill_after_a_loss, 3, (5, str(tmp_path))):
        assert (filled.source, where(filled)) == ("fresh", (0, 0, 4))
        assert "no checkpoint was due yet" in filled.reason
        assert (total, has_moments) == (SIZE / 3, False)


def test_a_job_whose_checkpoints_should_be_there_does_not_begin_anew(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="(?s)StorageError.* at step 20 .* found no checkpoint"):
        ranks.run(fill_after_a_loss, 3, (20, str(tmp_path)))


@dataclass(frozen=True)
class Loss:
    """What is left of a job of which some state is gone."""

    holders: int
    """Of two ranks, so many hold their half; all later ones are new."""
    known_step: int
    save_every: int | None
    has_folder: bool
    saved_step: int | None

    def outcome(self) -> str:
        """The dumb oracle: what the job does, or the step that its error names."""
        if self.holders == 2:
            return "peers"
        if self.has_folder and self.saved_step is not None:
            return "checkpoint"
        is_due = not self.has_folder or self.save_every is None or self.known_step >= 2 * self.save_every
        return f"error at step {self.known_step}" if self.known_step and is_due else "fresh"


LOSSES = [
    Loss(holders, known_step, save_every if has_folder else None, has_folder, saved_step)
    for holders in (0, 1, 2)
    for known_step in (0, 5, 20)
    for save_every in (None, 10)
    for has_folder in (False, True)
    for saved_step in ([None, 4] if has_folder and known_step else [None])
]


def fill_after(losses: list[Loss], folder: str) -> list[tuple[str, str]]:
    """What each loss comes to, and what was told of it."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    outcomes = []
    for number, loss in enumerate(losses):
        tensors = [torch.full((SIZE,), value) for value in (float(loss.known_step), 0.0)]
        old, wanted = (distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None) for one in tensors)
        root = location_of(f"{folder}/{number}")
        if loss.saved_step is not None:
            told = {"values": {}, "position": {"step": loss.saved_step, "samples": 10 * loss.saved_step}}
            save({"w": old, "job": told}, root / step_name(loss.saved_step))
        rules = FillRules(root if loss.has_folder else None, loss.save_every, line=4, known_step=loss.known_step)
        mine = held(loss.known_step, old) if rank < loss.holders else None
        try:
            filled = fill_state(CarriedState({"w": wanted}), Offers(mine), HOSTS, rules)
        except StorageError as error:
            step = re.search(r"had come to (step \d+)", str(error))
            outcomes.append((f"error at {step and step[1]}", str(error)))
            continue
        assert filled.position.step == {"fresh": 0, "peers": loss.known_step}.get(filled.source, loss.saved_step)
        outcomes.append((filled.source, filled.reason))
    return outcomes


def test_a_job_whose_steps_are_lost_goes_back_or_ends_and_begins_anew_only_before_its_first_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    """All states are gone, or one of two survives, or both."""
    for told in ranks.run(fill_after, 2, (LOSSES, str(tmp_path))):
        for loss, (outcome, reason) in zip(LOSSES, told, strict=True):
            assert outcome == loss.outcome(), (loss, reason)
            assert outcome != "fresh" or not loss.known_step or f"{loss.known_step} steps are lost" in reason, reason


def test_boxes_of_a_step_that_was_made_twice_do_not_go_together(ranks: RankPool) -> None:
    for filled, total in ranks.run(fill_from_two_lines, 3):
        assert (filled.source, filled.position.step) == ("snapshots", 10)
        assert total == 1.0 * SIZE / 3


def lose_the_word_that_all_are_filled(lost: int, is_behind: bool, folder: str) -> tuple[str, bool, bool]:
    """Rank ``lost`` was filled and does not hear that all were, for who would tell is gone; then all fill once more."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (3,))
    whole = torch.arange(36.0).view(6, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    columns: DTensor = distribute_tensor(torch.zeros(6, 6), mesh, [Shard(1)], src_data_rank=None)
    state, mine = CarriedState({"w": columns}), held(12, rows)
    if is_behind and rank == lost:  # it comes from an earlier step, and two others hold what is needed
        mine = held(10, rows)
    if is_behind and rank != lost:
        mine = held(12, whole)
    real = Farewell.wait

    def wait(farewell: Farewell, trouble: bool = False) -> bool:
        met_with_trouble = real(farewell, trouble)
        if rank == lost:
            raise RuntimeError("Connection closed by peer")
        return met_with_trouble

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Farewell, "wait", wait)
        if rank == lost:
            with pytest.raises(PeerError):
                fill_state(state, Offers(mine), HOSTS, FillRules())
        else:
            fill_state(state, Offers(mine), HOSTS, FillRules())
    kept = state.in_doubt or (mine if rank == lost else state.hold(12, 120, 0))
    assert (kept.step, kept.samples, kept.line) == (12, 120, 0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=3)
    wanted = torch.zeros(6, 6)
    filled = fill_state(CarriedState({"w": wanted}), Offers(kept), HOSTS, FillRules())
    return filled.source, torch.equal(wanted, whole), state.in_doubt is not None


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("lost", range(3))
def test_a_rank_that_does_not_hear_that_all_are_filled_keeps_what_others_gave_up(
    ranks: RankPool, tmp_path: Path, lost: int, is_behind: bool
) -> None:
    told = ranks.run(lose_the_word_that_all_are_filled, 3, (lost, is_behind, str(tmp_path)))
    assert told == [("peers", True, rank == lost) for rank in range(3)]


def fill_without_memory() -> str:
    """Rank 1 holds the step and has no room for the moments of its optimizer on the new mesh."""
    layer = torch.nn.Linear(SIZE, 1)
    pieces = {"layer.weight": piece_of(torch.full((1, SIZE), 3.0)), "layer.bias": piece_of(torch.zeros(1))}
    pieces |= {
        f"optim.state.layer.{name}.exp_avg": piece_of(torch.ones_like(p)) for name, p in layer.named_parameters()
    }
    mine = HeldState(12, 120, pieces, {}) if dist.get_rank() < 2 else None

    def refuse(self: CarriedState, wanted: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    optim = torch.optim.RMSprop(layer.parameters(), momentum=0.9)
    state = CarriedState({"layer": layer, "optim": optim})
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(CarriedState, "allocate", refuse)
        with pytest.raises(ConfigError) as raised:
            fill_state(state, Offers(mine), HOSTS, FillRules())
    assert not state.is_torn and (mine is None or mine.pieces["layer.weight"].tensor.eq(3.0).all())
    return str(raised.value)


def test_a_rank_without_memory_for_its_part_is_told_on_all_ranks_and_what_is_held_stands(ranks: RankPool) -> None:
    told = ranks.run(fill_without_memory, 3)
    assert len(set(told)) == 1
    assert "no memory left for its part of the state (CUDA out of memory" in told[0] and "rank 1" in told[0]


def fill_with_values(texts: list[dict[str, str]]) -> tuple[str, object]:
    """Each rank holds step 5 with values of its own; what a counter that is carried gets of them."""
    counter = Kept({"count": 0})
    held = CarriedState({"w": torch.ones(4)}).hold(5, 50, 0)
    mine = replace(held, values=texts[dist.get_rank()])
    state = CarriedState({"w": torch.zeros(4), "counter": counter})
    filled = fill_state(state, Offers(mine), HOSTS, FillRules())
    return filled.source, counter.state


class Kept:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


def test_values_that_only_some_ranks_have_come_to_all(ranks: RankPool) -> None:
    """As in a pipeline: rank 0 has no part of what the value belongs to."""
    text = encode("counter", {"count": (3, 4)})
    for source, state in ranks.run(fill_with_values, 3, ([{}, {"counter": text}, {"counter": text}],)):
        assert (source, state) == ("peers", {"count": (3, 4)})


def test_values_that_differ_by_rank_are_refused_and_not_replaced_by_those_of_rank_0(ranks: RankPool) -> None:
    texts = [{"counter": encode("counter", {"count": rank})} for rank in (1, 1, 2)]
    with pytest.raises(RanksFailed, match=r"carrying 'counter': .*\['count'\] is 1 and 2 on ranks 0 and 2") as failed:
        ranks.run(fill_with_values, 3, (texts,))
    assert [report.end for report in failed.value.reports] == ["raised"] * 3


def carry_by_rank(kind: str) -> None:
    """A new job whose ranks carry something of their own."""
    rank = dist.get_rank()
    one = {"values": Kept({"seed": rank}), "tensor": torch.full((3,), float(rank))}[kind]
    fill_state(CarriedState({"own": one}), Offers(None), HOSTS, FillRules())


@pytest.mark.parametrize("kind", ["values", "tensor"])
def test_a_new_job_that_carries_another_state_on_each_rank_is_refused_by_name(ranks: RankPool, kind: str) -> None:
    with pytest.raises(
        RanksFailed, match="carrying .own.: (its plain values differ between ranks|ranks 0 and 1 hold the same part)"
    ) as failed:
        ranks.run(carry_by_rank, 3, (kind,))
    assert [report.end for report in failed.value.reports] == ["raised"] * 3


def carry_sharded_moments() -> None:
    """torch's own optimizer that shards moments: its ``state`` is empty, an optimizer inside has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it loads
        optimizers = importlib.import_module("torch.distributed.optim")
    model = torch.nn.Linear(4, 4)
    optim = optimizers.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    fill_state(CarriedState({"model": model, "optim": optim}), Offers(None), HOSTS, FillRules())


def test_an_optimizer_that_keeps_its_moments_in_another_is_refused_in_the_first_generation(ranks: RankPool) -> None:
    words = "carrying optimizer 'optim': ZeroRedundancyOptimizer keeps the state of another optimizer, Adam"
    with pytest.raises(RanksFailed, match=words):
        ranks.run(carry_sharded_moments, 2)


def fill_from_marks(marks: list[int | None], counts: list[int]) -> tuple[str, float, object, int]:
    """Step 5: ranks hold it, each as many events after the step, and a count. What they are filled with."""
    mark, count = marks[dist.get_rank()], counts[dist.get_rank()]
    counter, mine = Kept({"count": -1}), None
    if mark is not None:
        values = {
            "counter": encode("counter", {"count": count}),
            POSITION: replace(Position(5, 50), mark=mark).to_text(),
        }
        mine = HeldState(5, 50, {"w": piece_of(torch.full((SIZE,), float(mark)))}, values)
    state = CarriedState({"w": (wanted := torch.zeros(SIZE)), "counter": counter})
    filled = fill_state(state, Offers(mine), HOSTS, FillRules())
    return filled.source, float(wanted.mean()), counter.state, filled.position.mark


def test_ranks_that_a_loss_found_at_other_places_behind_a_step_take_it_from_who_had_come_furthest(
    ranks: RankPool,
) -> None:
    """Rank 0 was lost sight of in an evaluation, 1 was behind it; a new one is on rank 2."""
    for filled in ranks.run(fill_from_marks, 3, ([1, 2, None], [1, 2, 0])):
        assert filled == ("peers", 2.0, {"count": 2}, 2)
    for filled in ranks.run(fill_from_marks, 3, ([2, 2, None], [2, 2, 0])):
        assert filled == ("peers", 2.0, {"count": 2}, 2)


def test_ranks_that_a_loss_found_at_other_places_right_behind_a_step_agree_on_the_first_ones_values(
    ranks: RankPool,
) -> None:
    """One had come through the evaluation and counted it, the other not; behind the next call they have to be alike."""
    for _, _, state, mark in ranks.run(fill_from_marks, 3, ([0, 0, None], [7, 6, 0])):
        assert (state, mark) == ({"count": 7}, 0)
    with pytest.raises(RanksFailed, match=r"carrying 'counter': .*\['count'\] is 7 and 6"):
        ranks.run(fill_from_marks, 3, ([1, 1, None], [7, 6, 0]))
