"""``remesh mpi doctor``: what it shows, and with what status it ends."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from remesh.carried import images
from remesh.carried.images import Finding
from remesh.carried.mpi.mpis import Installation
from remesh.cli import mpi as cli_mpi
from remesh.foundation.errors import ConfigError

_GOOD = Finding("platform", True, True, "linux", "")
_EXTRA = Finding("increments", False, False, "Linux 6.1", "every image is a full one")
_BAD = Finding("namespaces", False, True, "none", "run as root")
_HAS_MPI = [("mpich", Installation("mpich", "/opt/mpich/mpiexec", "/opt/python")), ("impi", ConfigError("not there"))]


@pytest.mark.parametrize(
    ("findings", "mpis", "status"),
    [
        ([_GOOD, _EXTRA], _HAS_MPI, 0),
        ([_GOOD, _BAD], _HAS_MPI, 1),
        ([_GOOD], [("impi", ConfigError("not there"))], 1),
    ],
)
def test_the_status_tells_whether_what_is_needed_is_there(
    monkeypatch: pytest.MonkeyPatch, findings: list[Finding], mpis: object, status: int
) -> None:
    monkeypatch.setattr(images, "examine_machine", lambda: findings)
    monkeypatch.setattr(cli_mpi, "find_all", lambda: mpis)
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(cli_mpi.mpi, ["doctor"])
    assert result.exit_code == status, result.output
    for finding in findings:
        assert finding.what in result.output
        assert finding.advice in result.output


def test_it_fits_a_terminal_of_80_columns_and_ends_with_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "looking for MPI 'impi': no environment with mpiexec and mpi4py; make one, or name another folder. " * 3
    lacking = [("impi", ConfigError(advice))]
    monkeypatch.setattr(images, "examine_machine", lambda: [_GOOD, Finding("root", False, True, "no", advice)])
    monkeypatch.setenv("COLUMNS", "80")
    for mpis in (lacking, _HAS_MPI):
        monkeypatch.setattr(cli_mpi, "find_all", lambda mpis=mpis: mpis)
        result = CliRunner().invoke(cli_mpi.mpi, ["doctor"])
        assert max(map(len, result.stdout.splitlines())) <= 80, result.stdout
    assert "cannot be checkpointed here: see root" in result.stderr
    monkeypatch.setattr(images, "examine_machine", lambda: [_GOOD])
    done = CliRunner().invoke(cli_mpi.mpi, ["doctor"])
    assert done.exit_code == 0 and done.stdout.splitlines()[-1].startswith("OK:")
    assert "impi: missing" in done.stdout and "not needed, another MPI is here" in done.stdout
