"""The pool of ranks: what a test can rely on when ranks return, raise, die or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from remesh.foundation.errors import ConfigError
from remesh.foundation.linux.procfs import start_of
from remesh.testbed.pool import DIED, RankPool, RanksFailed

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]


def _sum_of_ranks(scale: int) -> tuple[int, int, int]:
    value = torch.tensor([dist.get_rank() * scale])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), int(value)


def test_each_rank_has_its_place_in_a_fresh_group(ranks: RankPool) -> None:
    assert ranks.run(_sum_of_ranks, 4, (10,)) == [(rank, 4, 60) for rank in range(4)]


def test_the_same_workers_serve_groups_of_other_sizes(ranks: RankPool) -> None:
    for world_size in (2, 1, 3):
        total = sum(range(world_size))
        assert ranks.run(_sum_of_ranks, world_size, (1,)) == [(rank, world_size, total) for rank in range(world_size)]


def _pid() -> int:
    return os.getpid()


def test_workers_are_started_once(ranks: RankPool) -> None:
    assert ranks.run(_pid, 4) == ranks.run(_pid, 4)


def _gathered_row_sums(world_size: int) -> list[float]:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(24.0).reshape(6, 4)
    shared = distribute_tensor(whole, mesh, [Shard(0)])
    result: list[float] = (shared * 2).sum(1).redistribute(mesh, [Replicate()]).to_local().tolist()
    return result


def test_distributed_tensors_work_on_one_mesh_after_another(ranks: RankPool) -> None:
    expected = (torch.arange(24.0).reshape(6, 4) * 2).sum(1).tolist()
    for world_size in (2, 4, 2, 3):
        assert ranks.run(_gathered_row_sums, world_size, (world_size,)) == [expected] * world_size


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        found = 41
        raise ValueError(f"expected 42, found {found}")
    dist.barrier()


def test_an_exception_on_one_rank_fails_the_run_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks.run(_raise_on, 3, (1,))
    text = str(failure.value)
    assert "rank 1 raised" in text.splitlines()[0]
    assert "ValueError: expected 42, found 41" in text
    assert "found = 41" in text
    # The other ranks sat in a barrier, and came back before the run's own limit.
    assert "stuck" not in text


def _hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.1)


def test_a_hang_shows_the_stacks_and_the_pool_goes_on(ranks: RankPool) -> None:
    before = ranks.run(_pid, 2)
    with pytest.raises(RanksFailed) as failure:
        ranks.run(_hang_on, 2, (1,), timeout_s=1.0)
    text = str(failure.value)
    assert "rank 1 stuck" in text.splitlines()[0]
    assert "in _hang_on" in text
    assert not set(before) & set(ranks.run(_pid, 2))


def _wait_in_a_collective(without: int) -> None:
    if dist.get_rank() != without:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(1000)


def test_a_rank_blocked_inside_a_collective_shows_its_stack(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="in all_reduce"):
        ranks.run(_wait_in_a_collective, 2, (1,), timeout_s=1.0)


def _die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_a_rank_that_dies_unasked_fails_the_run(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 2 died by SIGKILL"):
        ranks.run(_die_on, 3, (2,))


def test_a_rank_may_be_expected_to_die(ranks: RankPool) -> None:
    assert ranks.run(_die_on, 3, (0,), dying=(0,)) == [DIED, "alive", "alive"]


def test_a_rank_that_was_to_die_but_lives_fails_the_run(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed):
        ranks.run(_die_on, 2, (0,), dying=(0, 1))


def _tell_pid_and_hang(folder: str) -> None:
    Path(folder, f"pid-{os.getpid()}").touch()
    time.sleep(1000)


_OWNER = """
import sys
from pathlib import Path
from remesh.testbed.pool import RankPool
from tests.procs.forked_programs import start
from tests.procs.testbed.test_rank_pool import _tell_pid_and_hang
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    code = "import os, signal; open(f'pid-{os.getpid()}', 'w').close(); signal.pause()"
    (folder / "waits.py").write_text(code)
    start(["waits.py"], folder, {}, folder / "output", folder / "errors")
    RankPool().run(_tell_pid_and_hang, 2, (sys.argv[1],))
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path: that of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pool-") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.procs
def test_workers_and_programs_end_with_the_process_that_owns_them(tmp_path: Path, short_folder: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(_OWNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(short_folder)}
    owner = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    pids: list[int] = []
    while len(pids) < 3:  # however long torch takes to start
        assert owner.poll() is None, "the owner of the pool has ended"
        time.sleep(0.05)
        pids = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    owner.kill()
    owner.wait()
    _wait_for(lambda: [pid for pid in pids if start_of(pid) is not None], lambda alive: not alive)
    _wait_for(lambda: list(short_folder.glob("remesh-*")), lambda left: not left)


def _wait_for(look: Callable[[], list[T]], done: Callable[[list[T]], bool]) -> list[T]:
    deadline_s = time.monotonic() + 120
    while not done(found := look()):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)
    return found


def _surroundings() -> tuple[str | None, str, str, int]:
    return os.environ.get("LEFT_BY_A_TEST"), os.getcwd(), str(torch.get_default_dtype()), torch.get_num_threads()


def _change_surroundings(folder: str) -> tuple[str | None, str, str, int]:
    os.environ["LEFT_BY_A_TEST"] = "yes"
    os.environ.pop("OMP_NUM_THREADS", None)
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    return _surroundings()


def test_what_a_run_changes_of_its_processes_is_not_the_next_ones(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks.run(_surroundings, 1)
    assert ranks.run(_change_surroundings, 1, (str(tmp_path),)) == [("yes", str(tmp_path), "torch.float64", 2)]
    assert ranks.run(_surroundings, 1) == before


def _unpicklable() -> object:
    return lambda: None


def test_a_result_that_cannot_travel_is_an_error_of_its_rank(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        ranks.run(_unpicklable, 1)


def _print_rank() -> None:
    print("hello from", dist.get_rank())


def test_what_ranks_print_is_shown_by_rank(ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(_print_rank, 2)
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def test_a_lambda_is_refused_before_any_rank_runs(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match="top of a module"):
        ranks.run(lambda: None, 1)


def test_a_world_beyond_the_pool_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match="found world_size 9, expected 1 to 8"):
        ranks.run(_pid, 9)
