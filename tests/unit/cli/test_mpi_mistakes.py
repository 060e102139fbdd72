"""``remesh mpi`` and typical mistakes: each is named with what to do, and leaves nothing that a next try meets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from remesh.carried.mpi import mpi_job
from remesh.carried.mpi.mpis import Installation
from remesh.carried.rounds.job_folder import JobFolder, JobSpec, JobState
from remesh.cli.group import main
from remesh.cli.mpi import mpi
from remesh.foundation.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, on a machine that has MPICH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mpi_job, "find_mpi", lambda name: Installation("mpich", "/opt/mpiexec", "/opt/python"))
    return tmp_path


def _refusal(*arguments: str) -> str:
    result: Result = CliRunner().invoke(mpi, arguments)
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


@pytest.mark.parametrize(
    ("options", "program", "said"),
    [
        (("--network", "tpc"), "app.py", "mpich on one host over 'tpc'.*expected --network shm or ofi"),
        (("--hosts", "a:1"), "app.py", "room for 1, expected exactly 2 ranks.*correct --hosts or the number of ranks"),
        (("--hosts", "a:2,b,c"), "app.py", "room for 2 and 2 hosts that share the rest, expected exactly 2"),
        (("--testbed", "1gbit"), "app.py", "give --hosts a,b with --testbed"),
        ((), "nope.py", "starting nope.py: no such program in .*; name one"),
        ((), "./nope", "starting ./nope: no such program in [^;]*; name one"),
        ((), "no-such-program-anywhere", "no such program in .* or on the PATH"),
    ],
)
def test_what_cannot_be_started_leaves_no_job(here: Path, options: tuple[str, ...], program: str, said: str) -> None:
    (here / "app.py").touch()
    assert re.search(said, _refusal("run", "-n", "2", "--job", "job", *options, program))
    assert [path.name for path in here.iterdir()] == ["app.py"]


def test_a_job_that_has_ended_is_gone_on_with_only_from_a_checkpoint(here: Path) -> None:
    folder = JobFolder.create(here / "job", JobSpec(("app.py",), 2, "/", {}))
    folder.write_state(JobState("finished", "all is well"))
    assert "finished (all is well), expected it to run; it has nothing left to save" in _refusal("checkpoint", "job")
    folder.write_state(JobState("failed", "rank 1 is gone"))
    assert "failed (rank 1 is gone), expected it to run; it has no checkpoint" in _refusal("checkpoint", "job")
    assert "it has none; start its program again" in _refusal("restart", "job")
    folder.commit_checkpoint(folder.begin_checkpoint()[1], {"number": 1})
    assert "continue it with `remesh mpi restart`" in _refusal("checkpoint", "job")
    assert "expected one of 1; leave --checkpoint out" in _refusal("restart", "job", "--checkpoint", "7")


def test_a_damaged_job_hides_no_other(here: Path) -> None:
    for name in ("good", "odd", "half"):
        folder = JobFolder.create(here / "remesh-jobs" / name, JobSpec(("app.py",), 2, "/", {}))
        folder.commit_checkpoint(folder.begin_checkpoint()[1], {"number": 1})
    (here / "remesh-jobs" / "odd" / "state.json").write_text('{"state": "running"}')
    (here / "remesh-jobs" / "half" / "images" / "000001" / "manifest.json").write_text("{")
    shown = CliRunner().invoke(mpi, ["ls"])
    assert shown.exit_code == 0, shown.exception
    rows = {words[1]: words for line in shown.stdout.splitlines() if len(words := line.split()) > 7}
    assert {rows[name][3] for name in ("good", "half")} == {"starting"} and rows["odd"][3] == "damaged"
    assert "(damaged)" in rows["half"]
    assert CliRunner().invoke(mpi, ["show", "half"]).exit_code == 0


def test_a_text_that_a_terminal_cannot_show_hides_no_job(here: Path) -> None:
    folder = JobFolder.create(here / "remesh-jobs" / "odd", JobSpec(("app.py",), 2, "/", {}))
    folder.write_state(JobState("failed", "the program said \ud800"))
    shown = CliRunner().invoke(main, ["mpi", "ls"])
    assert shown.exit_code == 0 and "the program said \\ud800" in shown.stdout, shown.exception


def test_a_job_that_was_made_anywhere_is_listed_by_its_folder(here: Path) -> None:
    folder = JobFolder.create(here / "elsewhere" / "j", JobSpec(("app.py",), 2, "/", {}))
    for root in (folder.path, folder.path.parent):
        shown = CliRunner().invoke(mpi, ["ls", str(root), "--json"])
        assert [one["job"] for one in json.loads(shown.stdout)] == ["j"]


def test_a_folder_without_jobs_is_named(here: Path) -> None:
    result = CliRunner().invoke(mpi, ["ls"])
    assert result.exit_code == 0 and "no job in remesh-jobs; name the folder that holds them" in result.stderr


def test_a_batch_script_has_the_options_of_the_program() -> None:
    words = ["slurm", "-n", "8", "--mpi", "mpich", "--job", "/s/j", "./a.out", "-n", "3", "--long"]
    script = CliRunner().invoke(mpi, words).output
    assert 'remesh mpi run -n 8 --mpi mpich --hosts "$hosts" --job /s/j ./a.out -n 3 --long &' in script
