"""``remesh torch``, hosts and torchrun's flags: mistakes are named with what to do, before anything is made."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import accelerator

from remesh.carried.hosts.host_list import Host
from remesh.carried.rounds.job_folder import JobFolder
from remesh.carried.rounds.leader import JobOutcome
from remesh.carried.torch.torch_job import TorchPlacement
from remesh.cli import torch as torch_verb
from remesh.foundation.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nnodes", "2"), "1 is named; name each host, as in --hosts a:2,b:2"),
        (("--nnodes", "3", "--hosts", "a,b"), "2 are named; name each host"),
        (("--nnodes", "1:4"), "expected one number, since a job keeps its ranks"),
        (("--nnodes", "2", "--node-rank", "1", "--hosts", "a,b"), "one command starts the ranks of all hosts"),
        (("--standalone", "--hosts", "a,b"), "--standalone is for one"),
        (("--hosts", "a,,b"), "a name is empty"),
        (("--hosts", "a:0,b"), "no rank for a"),
        (("--hosts", "a,a"), "a is named twice"),
        (("--hosts", "localhost,b"), "other hosts cannot call localhost"),
        (("--testbed", "1gbit"), "give --hosts a,b with --testbed"),
        (("--hosts", "a,b", "--testbed", "fast"), "fast"),
        (("--rdzv-conf", "timeout=3"), "no such option --rdzv-conf"),
        (("--tee=3",), "no such option --tee=3"),
        (("--nproc-per-node", "0"), "reading --nproc-per-node '0': expected 1 or more"),
        (("--nproc-per-node", "many"), "expected a number, auto, cpu, gpu or xpu"),
        (("--nproc-per-node", "gpu", "--hosts", "a,b"), "sees its own host, and not the others"),
    ],
)
def test_what_cannot_be_started_leaves_no_job(here: Path, options: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(torch_verb.torch, ["run", "--job", "job", *options, "train.py"])
    assert isinstance(result.exception, ConfigError), result.output
    assert re.search(said, str(result.exception))
    assert [path.name for path in here.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("options", "placed"),
    [
        (("--nproc-per-node", "3"), ()),
        (("--standalone", "--nproc_per_node", "3"), ()),
        (("--nproc-per-node", "cpu"), ()),
        (("--nproc-per-node", "auto"), ()),
        (("--nproc-per-node", "cpu", "--hosts", "a"), (Host("a", 3),)),
        (("--nnodes", "2", "--nproc-per-node=2", "--hosts", "a:1,b"), (Host("a", 1), Host("b", 2))),
        (("--nnodes=2", "--node-rank=0", "--rdzv-backend=c10d", "--rdzv-endpoint=a:29400", "--hosts", "a:1,b:2"),
         (Host("a", 1), Host("b", 2))),
    ],
)  # fmt: skip
def test_torchruns_flags_say_how_many_ranks_there_are(
    here: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], placed: tuple[Host, ...]
) -> None:
    placements: list[TorchPlacement] = []

    def stay(folder: JobFolder, placement: TorchPlacement, *_: object) -> JobOutcome:
        placements.append(placement)
        return JobOutcome("finished", "made believe", 0)

    monkeypatch.setattr(torch_verb, "run_job_once", stay)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(accelerator, "is_available", lambda: False)
    named = ("--rdzv-id", "7", "--master-addr", "h", "--master-port", "30000", "--max-restarts=3", "--job", "job")
    result = CliRunner().invoke(torch_verb.torch, ["run", *options, *named, "train.py", "--hosts", "of the script"])
    assert result.exit_code == 0, result.output
    assert [placement.hosts for placement in placements] == [placed]
    spec = JobFolder(here / "job").read_spec()
    assert (spec.num_ranks, spec.argv) == (3, ("train.py", "--hosts", "of the script"))
    chosen = {name: spec.environment[name] for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")}
    assert chosen == {"TORCHELASTIC_RUN_ID": "7", "MASTER_ADDR": "h", "MASTER_PORT": "30000"}


def test_a_batch_script_has_what_the_job_is_told() -> None:
    words = ["slurm", "-n", "8", "--job", "/s/j", "--interface", "ib0", "-m", "my.train", "--lr", "1"]
    script = CliRunner().invoke(torch_verb.torch, words).output
    assert "#SBATCH --ntasks=8" in script
    assert 'remesh torch run --interface ib0 --hosts "$hosts" --job /s/j -m my.train --lr 1 &' in script
    assert 'remesh torch restart /s/j --interface ib0 --hosts "$hosts" &' in script
