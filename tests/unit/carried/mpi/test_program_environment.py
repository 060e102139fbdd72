"""A program keeps its user's variables, and loses those that launchers set for the ranks of another job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remesh.carried.mpi.program_environment import (
    lower_environment,
    program_environment,
    rank_environment,
    rank_variables,
)

_SET_BY_LAUNCHERS = {
    "mpich": "GFORTRAN_UNBUFFERED_PRECONNECTED HYDI_CONTROL_FD MPI_LOCALNRANKS MPI_LOCALRANKID PMI_FD PMI_HOSTNAME "
    "PMI_RANK PMI_SIZE",
    "openmpi": "OMPI_ARGV OMPI_COMMAND OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_MCA_num_procs OMPI_UNIVERSE_SIZE "
    "OPAL_PREFIX OPAL_USER_PARAMS_GIVEN PMIX_RANK PMIX_NAMESPACE PMIX_SERVER_URI4 PRTE_LAUNCHED PRTE_SHARED_FS",
    "impi": "GFORTRAN_UNBUFFERED_PRECONNECTED HYDRA_BSTRAP_LOCALHOST HYDRA_LAUNCH_TYPE I_MPI_HYDRA_UUID I_MPI_INFO_NP "
    "MPI_LOCALNRANKS MPI_LOCALRANKID PMI_FD PMI_RANK PMI_SIZE",
}
"""As `mpiexec -n 1 env` shows them in an empty environment: Open MPI 5.0.11, MPICH 5.0.2, Intel MPI 2021.18."""
_OF_USERS = "MPI4PY_RC_THREADS MPI_HOME MPIR_MINE MPICC FI_PROVIDER UCX_TLS MY_PMI_RANK HYDRAULICS LD_LIBRARY_PATH HOME"


@pytest.mark.parametrize("mpi", _SET_BY_LAUNCHERS)
def test_what_launchers_set_is_taken(mpi: str) -> None:
    given = dict.fromkeys(_SET_BY_LAUNCHERS[mpi].split(), "1")
    assert program_environment(given, first_on_path="/s") == {"PYTHONPATH": "/s"}


def test_what_users_set_stays() -> None:
    given = dict.fromkeys(_OF_USERS.split(), "1")
    assert program_environment(given, first_on_path="/s") == {**given, "PYTHONPATH": "/s"}


def test_libraries_of_another_mpi_are_for_the_program_alone(tmp_path: Path) -> None:
    for place, library in (("ours/lib", "libmpi.so.40"), ("theirs/lib", "libmpich.so.12"), ("blas", "libblas.so.3")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / library).touch()
    (tmp_path / "ours/bin").mkdir()
    (tmp_path / "ours/bin/mpiexec").touch()
    given = {"HOME": "/h", "LD_LIBRARY_PATH": f"{tmp_path}/theirs/lib:{tmp_path}/blas:{tmp_path}/ours/lib:"}
    kept = {"HOME": "/h", "LD_LIBRARY_PATH": f"{tmp_path}/blas:{tmp_path}/ours/lib"}
    assert lower_environment(given, str(tmp_path / "ours/bin/mpiexec")) == kept
    assert lower_environment({"HOME": "/h", "LD_LIBRARY_PATH": f"{tmp_path}/theirs/lib"}, "/m/bin/mpiexec") == {
        "HOME": "/h"
    }
    assert program_environment(given)["LD_LIBRARY_PATH"] == given["LD_LIBRARY_PATH"]


def test_a_launcher_does_not_get_parts_of_another_mpi(tmp_path: Path) -> None:
    """As Debian has them: libpmix in a folder of its own, whose libmunge lies beside a libmpi."""
    files = ["ours/lib/libmpi.so.40", "ours/lib/openmpi/libpmix.so.2", "pmix2/lib/libpmix.so.2.6", "blas/libblas.so.3"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    given = {"LD_LIBRARY_PATH": os.pathsep.join(f"{tmp_path}/{name}" for name in ("pmix2/lib", "blas", "ours/lib"))}
    kept = {"LD_LIBRARY_PATH": os.pathsep.join(f"{tmp_path}/{name}" for name in ("blas", "ours/lib"))}
    assert lower_environment(given, str(tmp_path / "ours/bin/mpiexec")) == kept


def test_what_is_told_to_the_programs_mpi4py_is_not_told_to_ours() -> None:
    given = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "/theirs", "MPI4PY_RC_INITIALIZE": "0", "HOME": "/h"}
    assert lower_environment(given, "/m/bin/mpiexec") == {"HOME": "/h"}
    assert program_environment(given) == given


def test_a_rank_is_told_what_no_restart_changes() -> None:
    """A variable stands in an image: the number of a host, or of the ranks on it, would be wrong after a restart."""
    assert {name.rpartition("_")[2] for name in rank_variables(3, 8)} == {"RANK", "SIZE"}
    assert set(rank_variables(3, 8).values()) == {"3", "8"}


def test_a_lower_half_has_no_restartable_sequences_unless_its_user_wants_them() -> None:
    assert rank_environment({}) == {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
    assert rank_environment({"GLIBC_TUNABLES": "glibc.pthread.rseq=1", "HOME": "/h"}) == {
        "GLIBC_TUNABLES": "glibc.pthread.rseq=0:glibc.pthread.rseq=1"
    }
