"""Megatron's own training loop runs with this package in the place of its checkpoints, and goes on from either's.

`make interop` installs the releases whose wheels have the loop. A step has the same losses, to the bit, whichever
package has loaded what it begins with.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from remesh.cli import main
from remesh.wire.free_ports import free_port

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("training_rank.py")
_PATIENCE_S = 240
_RELEASES = ("0.17.1", "0.18.2", "0.19.2")
_WITH_FSDP = ("0.19.2",)
"""The others' own loop fails with FSDP of this torch."""

pytestmark = pytest.mark.long


@pytest.fixture(params=_RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release that is installed."""
    name = str(request.param)
    if not (_ROOT / ".interop" / name / "megatron" / "training").is_dir():
        pytest.skip(f"needs megatron-core {name}, which `make interop` installs")
    return name


def run_training(
    release: str,
    package: str,
    directory: Path,
    *,
    format_: str = "torch_dist",
    mode: str = "sync",
    size: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    until: int,
) -> list[float]:
    """Train until a step; the losses of the first rank."""
    port = str(free_port())
    paths = os.pathsep.join([str(_ROOT / ".interop" / release), str(_ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    said = [directory.with_name(f"{directory.name}-{package}-{until}-{rank}.txt") for rank in range(size)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            numbers = map(str, (rank, size, tensor_parallel, pipeline_parallel, until))
            command = [sys.executable, str(_SCRIPT), package, format_, mode, str(directory), *numbers]
            with said[rank].open("wb") as file:
                ranks.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
                )
        for rank, one in enumerate(ranks):
            code = one.wait(timeout=_PATIENCE_S)
            assert code == 0, (
                f"rank {rank} of {package} with {release}: {said[rank].read_text(errors='replace')[-3000:]}"
            )
    finally:
        for one in ranks:  # and what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
    losses: list[float] = json.loads(Path(f"{directory}-losses-0.json").read_text())
    return losses


@pytest.mark.parametrize(("package", "mode"), [("remesh", "async"), ("megatron", "sync")])
def test_the_loop_goes_on_from_two_ranks_on_one_with_either_package(
    release: str, package: str, mode: str, tmp_path: Path
) -> None:
    run_training(release, package, tmp_path / "saved", mode=mode, size=2, tensor_parallel=2, until=4)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "4"
    losses = {}
    for loader in ("remesh", "megatron"):
        copy = tmp_path / f"for-{loader}"
        shutil.copytree(tmp_path / "saved", copy)
        losses[loader] = run_training(release, loader, copy, until=6)
    assert len(losses["remesh"]) == 4  # two steps of two samples
    assert losses["remesh"] == losses["megatron"]


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 1), (1, 2)])
def test_the_loop_goes_on_from_a_converted_checkpoint_of_the_old_kind(
    release: str, tensor_parallel: int, pipeline_parallel: int, tmp_path: Path
) -> None:
    mesh = {"size": 2, "tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    saved, ours = tmp_path / "saved", tmp_path / "ours"
    run_training(release, "megatron", saved, format_="torch", until=4, **mesh)
    verb = [
        "ckpt",
        "convert",
        str(saved),
        str(ours / "iter_0000004"),
        "--from",
        "megatron-legacy",
        "--to",
        "torch_dist",
    ]
    main(verb, standalone_mode=False)
    shutil.copy(saved / "latest_checkpointed_iteration.txt", ours)
    shutil.copytree(ours, tmp_path / "on-one")
    theirs = run_training(release, "megatron", saved, format_="torch", until=6, **mesh)
    assert run_training(release, "megatron", ours, until=6, **mesh) == theirs
    on_one = run_training(release, "megatron", tmp_path / "on-one", until=6)
    if pipeline_parallel == 1:  # the losses of a pipeline are at its end
        assert on_one == pytest.approx(theirs, rel=1e-5)
    for name, tensor in stored_tensors(ours / "iter_0000006").items():
        assert torch.allclose(stored_tensors(tmp_path / "on-one" / "iter_0000006")[name], tensor, atol=1e-6), name


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 1), (1, 2)])
def test_the_loop_goes_on_from_parts_of_the_old_kind_that_were_made_of_the_new(
    release: str, tensor_parallel: int, pipeline_parallel: int, tmp_path: Path
) -> None:
    mesh = {"size": 2, "tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    saved, parts = tmp_path / "saved", tmp_path / "parts"
    run_training(release, "megatron", saved, until=4)
    verb = ["ckpt", "convert", str(saved / "iter_0000004"), str(parts), "--to", "megatron-legacy"]
    sizes = ["--tensor-parallel", str(tensor_parallel), "--pipeline-parallel", str(pipeline_parallel)]
    main([*verb, *sizes], standalone_mode=False)
    theirs = run_training(release, "megatron", saved, until=6, **mesh)
    assert run_training(release, "megatron", parts, format_="torch", mode="without-rng", until=6, **mesh) == theirs
    # What each saves two steps later has all values and moments, under every stage.
    back = tmp_path / "back"
    verb = ["ckpt", "convert", str(parts), str(back), "--from", "megatron-legacy", "--to", "torch_dist"]
    main(verb, standalone_mode=False)
    expected = stored_tensors(saved / "iter_0000006")
    assert all(tensor.equal(expected[name]) for name, tensor in stored_tensors(back).items())


def test_dtensors_are_saved_in_the_background_as_torch_saves_them(release: str, tmp_path: Path) -> None:
    if release not in _WITH_FSDP:
        pytest.skip(f"the training loop of megatron-core {release} does not run with FSDP of torch {torch.__version__}")
    for mode in ("async", "sync"):
        run_training(release, "remesh", tmp_path / mode, format_="torch_dcp", mode=mode, size=2, until=4)
    (early, late), (first, last) = (
        [stored_tensors(tmp_path / mode / f"iter_{step:07}") for step in (2, 4)] for mode in ("async", "sync")
    )
    assert len(early) > 20 and early.keys() == late.keys() == first.keys() == last.keys()
    assert all(torch.equal(early[name], first[name]) and torch.equal(late[name], last[name]) for name in early)
    assert not all(torch.equal(early[name], late[name]) for name in early)


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, as native torch reads them."""
    found = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    entries = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    whole = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(whole, checkpoint_id=directory, no_dist=True)
    return whole
