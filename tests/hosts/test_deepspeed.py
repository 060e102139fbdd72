"""What DeepSpeed itself writes becomes ours, and back, bit by bit: ZeRO 1, 2 and 3, of two and three ranks, on gloo."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.checkpoint.foreign.deepspeed import read_zero
from remesh.cli import main
from tests.hosts.jobs import run_ranks

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_SCRIPT = Path(__file__).with_name("deepspeed_rank.py")
_KINDS = ("exp_avg", "exp_avg_sq")


def _run(stage: int, num_ranks: int, folder: Path, *more: str) -> dict[str, Any]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed, which `make hosts` installs")
    folder.mkdir(exist_ok=True)
    extensions = str(folder.with_name("extensions"))  # whose locks outlive a job that was killed
    command = (str(_SCRIPT), str(stage), str(folder), *more)
    code, output = run_ranks(num_ranks, command, {"TORCH_EXTENSIONS_DIR": extensions})
    assert code == 0, output
    expected: dict[str, Any] = torch.load(folder / "expected.pt", weights_only=True)
    return expected


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_values_and_moments_come_out_bit_by_bit(tmp_path: Path, stage: int, num_ranks: int) -> None:
    expected = _run(stage, num_ranks, tmp_path / "ds")["parameters"]
    state = read_zero(tmp_path / "ds")
    assert len(expected) == 6 and state["optimizer"].keys() == expected.keys()
    for name, told in expected.items():
        assert told["master"].any() and state["model"][name].equal(told["master"]), name
        for kind in _KINDS:
            assert state["optimizer"][name][kind].equal(told[kind]), (name, kind)
        assert state["optimizer"][name]["step"] == 3
    of_kind = [sorted(name for name in expected if name.endswith(kind)) for kind in ("weight", "bias")]
    assert [sorted(group["params"]) for group in state["groups"]] == of_kind
    assert state["model"]["running"].float().equal(torch.arange(7.0)) and state["program"]["epoch"] == 2
    verb = ["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "c"), "--from", "deepspeed-zero", "--to"]
    main([*verb, "torch_dist"], standalone_mode=False)
    loaded = remesh.load(
        {"model": {name: torch.zeros(told["master"].shape) for name, told in expected.items()}}, tmp_path / "c"
    )
    assert all(loaded["model"][name].equal(told["master"]) for name, told in expected.items())


@pytest.mark.timeout(1800)
def test_parameters_that_deepspeed_has_dealt_out_in_turns_come_out_under_their_names(tmp_path: Path) -> None:
    """Compared with the module's own values: what DeepSpeed gathers by name is then of other parameters."""
    expected = _run(2, 2, tmp_path / "ds", "", "round_robin_gradients")["module"]
    state = read_zero(tmp_path / "ds")
    assert len(expected) == 6
    assert all(state["model"][name].bfloat16().equal(one) for name, one in expected.items())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_resumes_from_ours_under_any_stage_on_any_number_of_ranks(tmp_path: Path, stage: int) -> None:
    trained = _run(stage, 2, tmp_path / "ds")
    verb = ["ckpt", "convert"]
    main(
        [*verb, str(tmp_path / "ds"), str(tmp_path / "c"), "--from", "deepspeed-zero", "--to", "torch_dist"],
        standalone_mode=False,
    )
    main([*verb, str(tmp_path / "c"), str(tmp_path / "back"), "--to", "deepspeed-universal"], standalone_mode=False)
    same = _run(stage, 2, tmp_path / "back", "universal")
    assert same["losses"] == trained["losses"]
    others = [same, _run(stage % 3 + 1, 3, tmp_path / "back", "universal")]
    for one in others:
        for name, told in trained["parameters"].items():
            assert all(one["parameters"][name][kind].equal(told[kind]) for kind in told), name
