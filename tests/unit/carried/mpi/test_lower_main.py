"""A rank that finds no leader goes at once: finalising MPI would wait for ranks that may be gone."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remesh.carried.mpi.lower import __main__ as lower
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.foundation.errors import PeerError
from remesh.wire.messages import Line


def test_a_rank_without_a_leader_leaves_without_finalising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = JobFolder.create(tmp_path / "job", JobSpec(("app.py",), 1, "/", {}))
    world = SimpleNamespace(Get_rank=lambda: 3, Get_size=lambda: 4)
    monkeypatch.setattr(lower.Starter, "make", lambda: None)
    monkeypatch.setattr(lower, "_start_mpi", lambda: SimpleNamespace(COMM_WORLD=world))

    def connect(*_: Any) -> None:
        raise PeerError("starting rank 3: nobody answers")

    def leave(status: int) -> None:
        raise SystemExit(f"at once with {status}")

    monkeypatch.setattr(Line, "connect", connect)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="at once with 1"):
        lower.main([str(folder.path), "127.0.0.1:1"])
    assert "nobody answers" in capfd.readouterr().err


def test_ranks_have_process_ids_of_their_own_which_programs_name_files_by_and_draw_from(tmp_path: Path) -> None:
    folder = JobFolder.create(tmp_path / "job", JobSpec(("/bin/true",), 3, "/", {}))
    assert len({lower._command(folder, rank).pid for rank in range(3)}) == 3
