"""The script for Slurm is one that a shell can read, with every name quoted."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from remesh.ranks.slurm import make_script


def test_names_with_spaces_stay_whole() -> None:
    script = make_script(4, "mpich", "/scratch/my job", ["app.py", "a b"])
    assert "--job '/scratch/my job' app.py 'a b'" in script
    assert "'/scratch/my job/images'/'[0-9]*'" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, which is not on the path")
@pytest.mark.procs
def test_a_shell_can_read_it() -> None:
    script = make_script(4, "mpich", "/scratch/my job", ["app.py", "it's"])
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
