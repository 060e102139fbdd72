"""Metrics of a run's checkpoints: which one is the best, and which stay, after any saves, kills and values."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.storage.store import LocalStore
from remesh.foundation.options import OptionError
from remesh.foundation.retention import KeepBest, KeepEvery, KeepLast, Policy
from tests.profiles import seeds

_CHANGES = ("create", "create_once", "put", "write_soon", "settle", "rename", "remove", "remove_directory")


class Killed(BaseException):
    """Stands for SIGKILL: no handler of errors may hold it up."""


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(step)), "step": step}


def test_the_best_is_found_again_by_a_run_that_goes_on(tmp_path: Path) -> None:
    checkpoints = remesh.Checkpoints(tmp_path, keep=[KeepLast(1), KeepBest("loss", 2)], background=True)
    assert checkpoints.best("loss") is None
    for step, loss in enumerate((3.0, 1.0, 2.0, math.nan, 4.0)):
        checkpoints.save(step, state(step), metrics={"loss": loss, "accuracy": -loss})
    checkpoints.wait()
    again = remesh.Checkpoints(tmp_path)
    assert again.steps() == [1, 2, 4] and again.metrics()[2] == {"loss": 2.0, "accuracy": -2.0}
    assert again.best("loss") == 1 and again.best("accuracy", largest=True) == 1 and again.best("accuracy") == 4
    wanted = state(0)
    assert again.load(wanted, again.best("loss"))["step"] == 1 and wanted["w"].eq(1).all()


def test_a_metric_that_nobody_saved_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = remesh.Checkpoints(tmp_path, keep=[KeepBest("loss", 1)])
    checkpoints.save(1, state(1))
    assert checkpoints.best("loss") is None and checkpoints.metrics() == {1: {}}
    with pytest.raises(OptionError, match="option 'metrics' has los, expected 'loss' among them"):
        checkpoints.save(2, state(2), metrics={"los": 1.0})
    checkpoints.save(2, state(2), metrics={"loss": 1.0})
    with pytest.raises(CheckpointMismatchError, match="found checkpoints with loss, expected 'los'"):
        checkpoints.best("los")


@pytest.mark.parametrize("metrics", [{"loss": "1"}, {"loss": True}, {1: 1.0}, [1.0], {"loss": torch.ones(())}])
def test_what_is_no_number_is_refused_before_anything_is_written(tmp_path: Path, metrics: Any) -> None:
    checkpoints = remesh.Checkpoints(tmp_path / "run")
    with pytest.raises(OptionError, match="option 'metrics'"):
        checkpoints.save(1, state(1), metrics=metrics)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"loss": "low"}', "[" * 100_000, "\xff"])
def test_a_damaged_file_of_metrics_is_told_and_loses_no_checkpoint(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = remesh.Checkpoints(tmp_path, keep=[KeepBest("loss", 1)])
    checkpoints.save(1, state(1), metrics={"loss": 1.0})
    (tmp_path / step_name(1) / "metrics.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointFormatError, match=r"metrics\.json: expected .*, found: .* correct the file"):
        checkpoints.best("loss")
    checkpoints.save(2, state(2), metrics={"loss": 2.0})
    assert checkpoints.steps() == [1, 2] and "expected a JSON object of numbers" in caplog.text


def beats(mine: tuple[int, float], other: tuple[int, float], largest: bool) -> bool:
    (step, value), (other_step, other_value) = mine, other
    return step > other_step if value == other_value else (value > other_value) == largest


def stays(step: int, all_metrics: Mapping[int, Mapping[str, float]], policies: Sequence[Policy]) -> bool:
    """By the words of the guide, one checkpoint after the other."""
    if step == max(all_metrics) or not policies:
        return True
    for policy in policies:
        others = [other for other in all_metrics if other != step]
        if isinstance(policy, KeepLast):
            keeps = sum(other > step for other in others) < policy.count
        elif isinstance(policy, KeepEvery):
            keeps = not any(other < step and other // policy.num_steps == step // policy.num_steps for other in others)
        else:
            value = all_metrics[step].get(policy.metric, math.nan)
            rivals = [(o, all_metrics[o].get(policy.metric, math.nan)) for o in others]
            better = [one for one in rivals if not math.isnan(one[1]) and beats(one, (step, value), policy.largest)]
            keeps = not math.isnan(value) and len(better) < policy.count
        if keeps:
            return True
    return False


def save_and_die(checkpoints: remesh.Checkpoints, step: int, metrics: Any, num_changes: int) -> bool:
    """Save, killed before so many changes of the store are done; whether it came to its end before that."""
    left = num_changes

    def mortal(change: Any) -> Any:
        def act(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*arguments, **options)

        return act

    with pytest.MonkeyPatch.context() as patch:
        for name in _CHANGES:
            patch.setattr(LocalStore, name, mortal(getattr(LocalStore, name)))
        try:
            checkpoints.save(step, state(step), metrics=metrics)
        except Killed:
            return False
    return True


def drawn_policies(rng: random.Random) -> list[Policy]:
    every = [KeepLast(rng.randint(1, 3)), KeepEvery(rng.randint(2, 6))]
    best = [KeepBest("loss", rng.randint(1, 3)), KeepBest("accuracy", rng.randint(1, 2), largest=True)]
    return rng.sample([*every, *best], rng.randint(0, 4))


def drawn_metrics(rng: random.Random) -> dict[str, float] | None:
    values = [0.0, 1.0, 2.0, 2.5, math.inf, math.nan]
    return None if rng.random() < 0.25 else {"loss": rng.choice(values), "accuracy": rng.choice(values)}


def same(found: Mapping[int, Mapping[str, float]], expected: Mapping[int, Mapping[str, float]]) -> bool:
    return {step: repr(sorted(of.items())) for step, of in found.items()} == {
        step: repr(sorted(of.items())) for step, of in expected.items()
    }


@pytest.mark.parametrize("seed", seeds(6, quick=1))
def test_any_saves_and_kills_leave_what_the_policies_keep(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    policies, held, step = drawn_policies(rng), dict[int, dict[str, float]](), 0
    for _ in range(24):
        metrics = drawn_metrics(rng)
        checkpoints = remesh.Checkpoints(tmp_path, keep=policies)
        ended = save_and_die(checkpoints, step, metrics, rng.randint(0, 40) if rng.random() < 0.5 else 10**6)
        checkpoints = remesh.Checkpoints(tmp_path, keep=policies)
        found, with_new = checkpoints.metrics(), {**held, step: metrics or {}}
        kept = {one: of for one, of in with_new.items() if stays(one, with_new, policies)}
        if ended:
            assert same(found, kept)
        elif step in found:  # killed while it removed others
            assert found.keys() >= kept.keys() and same(found, {one: with_new[one] for one in found})
        else:
            assert same(found, held)
        held = {one: with_new[one] for one in found}
        for metric, largest in (("loss", False), ("accuracy", True)):
            known = {one: of[metric] for one, of in held.items() if not math.isnan(of.get(metric, math.nan))}
            best = [a for a in known if all(a == b or beats((a, known[a]), (b, known[b]), largest) for b in known)]
            assert checkpoints.best(metric, largest=largest) == (best[0] if best else None)
        if step in held:
            assert checkpoints.load(state(-1))["step"] == step
            step += rng.randint(1, 3)
    checkpoints.save(step, state(step))
    assert len(list(tmp_path.iterdir())) == len(checkpoints.steps()), "what killed saves and removals left is gone"
