"""A run's checkpoints over ranks: saved in the background, killed in saves, restarted, always one newest for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import remesh
from remesh.checkpoint import plain
from remesh.checkpoint.plan.step_names import step_name
from remesh.foundation.errors import Error
from remesh.foundation.retention import KeepBest
from remesh.testbed.pool import RankPool
from tests.procs.forked_programs import run_program

_SCRIPT = Path(__file__).parents[1] / "scripts" / "restarted_jobs.py"
_SHAPE = (6, 4)


def _state(step: int) -> dict[str, Any]:
    whole = torch.arange(24.0).reshape(_SHAPE) + step
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return {"cut": distribute_tensor(whole, mesh, [Shard(0)]), "model": model, "step": step}


def _train_while_saving(root: str) -> list[Any]:
    state = _state(0)
    with remesh.Checkpoints(root, keep=2, background=True) as checkpoints:
        for step in range(1, 5):
            for key, value in _state(step).items():
                state[key] = value
            saved = checkpoints.save(step, state)
            # The program's own group is free while a thread writes and commits.
            state["cut"].to_local().fill_(-1)
            busy = torch.ones(1000)
            for _ in range(20):
                dist.all_reduce(busy)
    wanted = _state(0)
    found = checkpoints.load(wanted)
    assert torch.equal(wanted["cut"].full_tensor(), torch.arange(24.0).reshape(_SHAPE) + 4)
    assert wanted["model"].weight.eq(4).all()
    return [checkpoints.latest(), checkpoints.steps(), found["step"], Path(str(saved.result())).name]


def test_saves_behind_a_busy_group_commit_by_themselves(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_train_while_saving, 3, (str(tmp_path),)) == [[4, [3, 4], 4, step_name(4)]] * 3


def _load_on_fewer(root: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = {"cut": distribute_tensor(torch.zeros(_SHAPE), mesh, [Replicate()])}
    remesh.Checkpoints(root).load(wanted)
    return wanted["cut"].to_local().tolist()


def test_another_number_of_ranks_loads_them(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_train_while_saving, 4, (str(tmp_path),))
    assert ranks.run(_load_on_fewer, 2, (str(tmp_path),)) == [(torch.arange(24.0).reshape(_SHAPE) + 4).tolist()] * 2


def _save_in_halves(root: str) -> str:
    """Two groups save at once, in opposite orders where a rank has both."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    state = {"w": torch.full((4,), float(mine))}
    saved = remesh.save(state, f"{root}/{mine}", group=pairs[mine], background=True)
    everyone = remesh.save({"w": torch.full((4,), 9.0)}, f"{root}/all", background=True)
    everyone.result()
    saved.result()
    remesh.load(state, f"{root}/{mine}", group=pairs[mine])
    return str(state["w"].tolist())


def test_groups_save_side_by_side(ranks: RankPool, tmp_path: Path) -> None:
    zeros, ones = str([0.0] * 4), str([1.0] * 4)
    assert ranks.run(_save_in_halves, 4, (str(tmp_path),)) == [zeros, zeros, ones, ones]


def _differ(root: str) -> str:
    try:
        remesh.save({"w": torch.zeros(3)}, root, background=dist.get_rank() == 1)
    except Error as raised:
        return str(raised)
    return "saved"


def test_ranks_that_do_not_all_save_in_the_background_are_told(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(_differ, 3, (str(tmp_path / "c"),))
    assert len(set(said)) == 1
    assert "option background is False on rank 0 and True on rank 1" in said[0]


def _fail_behind(root: str, asking: list[int]) -> list[str]:
    said = []
    checkpoints = remesh.Checkpoints(root, keep=1, background=True)
    checkpoints.save(1, {"w": torch.zeros(3)}).result()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            # What this rank is to write, it cannot.
            def full(*_: Any, **__: Any) -> Any:
                raise OSError(28, "No space left on device")

            patch.setattr(plain, "write_part", full)
        saved = checkpoints.save(2, {"w": torch.ones(3)})
        asks = dist.get_rank() in asking
        for act in (saved.result, checkpoints.wait) if asks else (checkpoints.wait,):
            try:
                act()
                said.append("went on")
            except Error as raised:
                said.append(str(raised))
    return [*said, str(checkpoints.latest())]


def test_what_one_rank_could_not_write_is_raised_on_all_and_once(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(_fail_behind, 3, (str(tmp_path), [0, 1, 2]))
    assert said[0] == said[1] == said[2]
    assert "No space left" in said[0][0] and said[0][1:] == ["went on", "1"]


def test_what_not_all_ranks_have_asked_for_is_raised_on_all(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(_fail_behind, 3, (str(tmp_path), [0]))
    assert said[1] == said[2] == said[0][1:], "rank 0 does not go on alone"
    assert "No space left" in said[1][0] and said[1][1] == "1"


def _measure(root: str) -> list[Any]:
    """Metrics that differ between ranks, then equal ones; a rank that could not have them is refused with all."""
    rank, said = dist.get_rank(), list[Any]()
    checkpoints = remesh.Checkpoints(root, keep=[KeepBest("loss", 1)])
    for metrics in ({"loss": float(rank)}, {"los": 1.0} if rank == 1 else {"loss": 1.0}):
        try:
            checkpoints.save(1, {"w": torch.zeros(3)}, metrics=metrics)
        except Error as raised:
            said.append(str(raised))
    for step, loss in ((1, 2.0), (2, 1.0), (3, float("nan"))):
        checkpoints.save(step, {"w": torch.zeros(3)}, metrics={"loss": loss})
    return [*said, checkpoints.best("loss"), checkpoints.steps()]


def test_ranks_agree_on_metrics_and_on_the_best(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(_measure, 3, (str(tmp_path),))
    assert said[0] == said[1] == said[2]
    assert "option metrics is '{\"loss\": 0.0}' on rank 0 and '{\"loss\": 1.0}' on rank 1" in said[0][0]
    assert "has los, expected 'loss' among them" in said[0][1]
    assert said[0][2:] == [2, [2, 3]]


def _ask_otherwise_on_one_rank(root: str) -> list[Any]:
    """Whatever only the first rank does, no rank is answered, or has removed, what it did not ask for."""
    is_other, state = dist.get_rank() == 1, {"w": torch.zeros(3)}
    checkpoints = remesh.Checkpoints(root)
    for step in (1, 2, 3):
        checkpoints.save(step, state, metrics={"loss": float(step)})
    acts: list[Callable[[], Any]] = [
        lambda: checkpoints.drop_after(1 if is_other else 3),
        lambda: checkpoints.load(state, 1 if is_other else 2),
        lambda: checkpoints.load(state, 1 if is_other else None),
        lambda: checkpoints.best("loss", largest=is_other),
        lambda: checkpoints.best("los" if is_other else "loss"),
        lambda: checkpoints.save(5 if is_other else 4, state),
        lambda: remesh.Checkpoints(root, keep=1 if is_other else None).save(4, state),
    ]
    said = []
    for act in acts:
        with pytest.raises(Error) as raised:
            act()
        said.append(str(raised.value))
    return [*said, checkpoints.steps()]


def test_what_one_rank_asks_of_a_run_otherwise_is_named_on_all(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(_ask_otherwise_on_one_rank, 3, (str(tmp_path),))
    assert said[0] == said[1] == said[2]
    *texts, steps = said[0]
    told = ["step is 3", "step is 2", "step is None", "largest is False", "metric is 'loss'", "step is 4", "keep is"]
    for text, name in zip(texts, told, strict=True):
        assert f"option {name}" in text and "on rank 0 and" in text
    assert steps == [1, 2, 3], "nothing was saved or removed"


def restart_and_look(folder: Path, num_lives: int, seed: int) -> str:
    """What the lives of a job came to, in words; AssertionError with the output of a failed one."""
    return run_program(_SCRIPT, folder, str(folder), str(num_lives), str(seed))


@pytest.mark.procs
def test_a_job_that_is_killed_in_saves_goes_on_from_its_newest_each_time(tmp_path: Path) -> None:
    assert "8 lives" in restart_and_look(tmp_path, 8, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_forty_lives(tmp_path: Path, seed: int) -> None:
    assert "40 lives" in restart_and_look(tmp_path, 40, seed)
