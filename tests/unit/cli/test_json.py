"""With ``--json`` a verb prints one document and nothing else; files are opened before the work begins."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.checkpoint.plan.step_names import step_name
from remesh.cli import main
from remesh.foundation.exit_codes import ExitCode

_MOVE = ("--shape", "8,8", "--src", "S0R@2x2", "--dst", "RS0@2x2")
# Every verb, by whether it lists or shows. A new one is put where it belongs.
SHOWING = {
    *("ckpt diff", "ckpt gc", "ckpt ls", "ckpt show", "ckpt verify", "mpi doctor", "mpi ls", "mpi show"),
    *("net probe", "pipeline compare", "pipeline draw", "pipeline search", "plan", "testbed list", "top"),
    *("torch ls", "torch show"),
}
ACTING = {
    *("ckpt convert", "ckpt export", "ckpt merge", "dashboard", "mpi checkpoint", "mpi restart", "mpi run"),
    *("mpi slurm", "run", "testbed clean", "testbed link", "testbed run"),
    *("torch checkpoint", "torch restart", "torch run", "torch slurm"),
}


def _verbs(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _verbs(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_every_verb_that_shows_something_shows_it_to_programs_too() -> None:
    found = dict(_verbs(main))
    assert {name for name in found if name.split()[-1] in ("ls", "list", "show", "diff", "verify")} <= SHOWING
    assert set(found) == SHOWING | ACTING
    with_json = {name for name, command in found.items() if any("--json" in one.opts for one in command.params)}
    assert with_json == SHOWING


@pytest.fixture
def root(tmp_path: Path) -> Path:
    matrix = torch.arange(16.0).reshape(4, 4)
    for step in (1, 2):
        remesh.save({"w": matrix * step, "lr": 0.1, "odd": {1, 2}}, tmp_path / step_name(step))
    (tmp_path / step_name(0)).mkdir()
    (tmp_path / step_name(0) / ".remesh-save-in-progress").touch()
    return tmp_path


def told(*line: object, code: int = ExitCode.OK) -> Any:
    done = CliRunner().invoke(main, [*map(str, line), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_checkpoints(root: Path) -> None:
    listed = told("ckpt", "ls", root)
    assert [(one["step"], one["state"]) for one in listed] == [(0, "unfinished"), (1, "complete"), (2, "complete")]
    first, second = root / step_name(1), root / step_name(2)
    shown = told("ckpt", "show", first)
    assert [(one["name"], one["shape"], one["num_bytes"]) for one in shown["tensors"]] == [("w", [4, 4], 64)]
    assert shown["common"] == {"lr": 0.1, "odd": "{1, 2}"}
    assert told("ckpt", "show", first, "w", "--values")["values"][3] == [12.0, 13.0, 14.0, 15.0]
    assert told("ckpt", "diff", first, first)["equal"] is True
    differing = told("ckpt", "diff", first, second, code=ExitCode.FAILED)
    assert differing["equal"] is False and list(differing["differing"]) == ["w"]
    assert told("ckpt", "verify", first)["ok"] is True
    planned = told("ckpt", "gc", root, "--keep-last", 1)
    assert not planned["removed"] and [one["removes"] for one in planned["decisions"]] == [True, True, False]
    assert told("ckpt", "gc", root, "--keep-last", 1, "--yes")["bytes"] == planned["bytes"]
    assert [one["step"] for one in told("ckpt", "ls", root)] == [2]


def test_numbers_that_json_lacks_stand_as_text(tmp_path: Path) -> None:
    path = tmp_path / step_name(1)
    with remesh.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.tensor([math.nan, math.inf])}, metrics={"loss": math.nan})
    assert told("ckpt", "show", path, "w", "--values")["values"] == ["nan", "inf"]
    assert told("ckpt", "ls", tmp_path)[0]["metrics"] == {"loss": "nan"}


def test_plans_and_pipelines() -> None:
    plan = told("plan", *_MOVE, "--compare")
    assert plan["certified_ratio"] == 1.0 and {one["strategy"] for one in plan["others"]} >= {"split"}
    compared = told("pipeline", "compare", "--stages", 3, "-m", 4)
    assert compared["num_stages"] == 3 and all(one["step_s"] >= compared["bound_s"] for one in compared["schedules"])
    drawn = told("pipeline", "draw", "1f1b", "--stages", 2, "-m", 2)
    assert drawn["rows"][1] == ["1F0", "1B0", "1F1", "1B1"]
    assert told("pipeline", "search", "--stages", 2, "-m", 2)["reason"]


def test_jobs_and_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMESH_JOBS", str(tmp_path))
    monkeypatch.setattr("remesh.cli.mpi._examine_machine", list)
    monkeypatch.setattr("remesh.cli.mpi.find_all", lambda: [("openmpi", ValueError("none here"))])
    monkeypatch.setattr("remesh.cli.testbed.known_testbeds.find_testbeds", list)
    assert told("mpi", "ls") == []
    job = JobFolder.create(tmp_path / "j", JobSpec(("./a.out",), 2, str(tmp_path), {}))
    assert told("mpi", "show", job.path)["num_ranks"] == 2
    assert [one["job"] for one in told("torch", "ls", tmp_path)] == ["j"]
    assert told("testbed", "list") == []
    assert [one["what"] for one in told("mpi", "doctor", code=ExitCode.FAILED)] == [
        "C extension",
        "library for programs",
        "MPI openmpi",
    ]
    assert told("top", tmp_path)["job"].endswith(tmp_path.name)


@pytest.mark.parametrize(
    "line",
    [
        ["plan", *_MOVE, "--svg"],
        ["plan", *_MOVE, "--out"],
        ["pipeline", "search", "--csv"],
        ["net", "probe", "--testbed", "2x100mbit"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_told_before_the_work_begins(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    for place in ("plan.plan_reshard", "pipeline.search_schedule", "net.Testbed"):
        monkeypatch.setattr(f"remesh.cli.{place}", work)
    done = CliRunner().invoke(main, [*line, str(tmp_path / "none" / "file")])
    assert done.exit_code == ExitCode.USAGE and "No such file or directory; name a file in a folder" in done.output


def test_a_file_keeps_what_it_held_when_the_work_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "picture.svg"
    picture.write_text("before")

    def fail(*_: object, **__: object) -> None:
        raise remesh.PlanError("planning: it cannot be done; ask for something else")

    with monkeypatch.context() as patched:
        patched.setattr("remesh.cli.plan.plan_reshard", fail)
        assert CliRunner().invoke(main, ["plan", *_MOVE, "--svg", str(picture)]).exit_code == ExitCode.USAGE
    assert picture.read_text() == "before" and list(tmp_path.iterdir()) == [picture]
    assert CliRunner().invoke(main, ["plan", *_MOVE, "--svg", str(picture)]).exit_code == ExitCode.OK
    assert picture.read_text().startswith("<svg") and list(tmp_path.iterdir()) == [picture]


def test_a_device_can_be_written_to() -> None:
    assert CliRunner().invoke(main, ["plan", *_MOVE, "--svg", "/dev/null"]).exit_code == ExitCode.OK
