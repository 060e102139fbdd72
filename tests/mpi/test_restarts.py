"""A program that knows nothing of us is stopped under one MPI and ends under another, with the same answer."""

from __future__ import annotations

import pytest

from remesh.carried.hosts.host_list import Host
from remesh.carried.hosts.imaging import IMAGE
from remesh.carried.images.form.image_reader import read_image
from remesh.carried.images.form.kinds import ARENA_PATH
from remesh.carried.mpi.mpi_job import Placement, RunSettings
from tests.mpi.conftest import FOREIGN, Job, ending_once, stop_after

pytestmark = pytest.mark.mpi

_ANSWERS = {
    "ring": "answer b1cd1c8a14377307",
    "jacobi": "answer be4640655e9c76e8",
    "cg": "answer 767f22bbf0045625",
    "fft": "answer eca5eb6cde9eded9",
    "master": "answer 558430519",
    "pool": "answer 189529826",
    "windows": "answer 3a14d8107e264095",
    "files": "answer 3552642579",
}
"""Of 30 steps on 4 ranks, from a real MPI without us."""


@pytest.mark.parametrize("program", _ANSWERS)
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param("openmpi", "mpich", marks=pytest.mark.slow), ("mpich", "impi"), ("impi", "openmpi")],
)
def test_a_restart_under_another_mpi_gives_the_same_answer(job: Job, program: str, before: str, after: str) -> None:
    job.create(program, 30, 0.1)
    stopped = job.stay(before, watch=stop_after(0.4))
    assert stopped.outcome.state == "stopped", job.events
    assert job.answer is None
    ended = job.stay(after, checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == _ANSWERS[program]


def test_locks_of_windows_are_carried_with_those_who_hold_and_await_them(job: Job) -> None:
    bookings = 30
    job.create("ledger", bookings, 0.03)
    checkpoint, waiting = None, 0
    for mpi in ("mpich", "openmpi", "impi"):
        stopped = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(0.6))
        assert stopped.outcome.state == "stopped" and stopped.last_checkpoint is not None, job.events
        waiting += stopped.last_checkpoint["caught"].get("locks waited for", 0)
        checkpoint = job.folder.checkpoint(None)
    assert waiting
    ended = job.stay("mpich", checkpoint=checkpoint)
    assert ended.outcome.state == "finished", job.events
    assert job.answer == f"answer {4 * bookings} {bookings * 6000 + 4 * sum(range(bookings))}"


@pytest.mark.slow
def test_communicators_that_are_freed_while_ranks_are_held_do_not_keep_them_from_a_checkpoint(job: Job) -> None:
    job.create("short_lived", 40, 0.1)
    checkpoint = None
    for mpi in ("mpich", "openmpi", "impi"):
        stopped = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(0.5))
        assert stopped.outcome.state == "stopped" and stopped.last_checkpoint is not None, job.events
        assert stopped.last_checkpoint["attempts"] == 1, job.events
        checkpoint = job.folder.checkpoint(None)
    ended = job.stay("mpich", checkpoint=checkpoint)
    assert ended.outcome.state == "finished", job.events
    assert job.answer == "answer 942146 873174 589526 164229"


@pytest.mark.slow
def test_arrays_that_both_halves_share_are_carried_by_a_chain_of_images(job: Job) -> None:
    job.create("arrays", 60, 0.1, num_ranks=3, REMESH_SHARED_ARRAYS="1")
    assert job.stay("mpich", watch=stop_after(2.0)).outcome.state == "stopped", job.events
    image = job.folder.checkpoint(None).rank_folder(0) / IMAGE
    assert any(area.path == ARENA_PATH for area in read_image(image).areas.areas)
    settings = RunSettings(every_s=0.5, incremental=True)
    second = job.stay("openmpi", settings=settings, checkpoint=job.folder.checkpoint(None), watch=stop_after(2.5))
    assert second.outcome.state == "stopped", job.events
    ended = job.stay("impi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == "answer 18ac36963e49392b"


@pytest.mark.parametrize("shared", ["0", "1"], ids=["plain", "shared"])
def test_what_was_sent_ahead_and_not_received_is_received_under_another_mpi(job: Job, shared: str) -> None:
    """Each stay is over TCP and stops while every rank has long messages that nobody has received."""
    job.create("unreceived", 4, 1.0, num_ranks=2, REMESH_SHARED_ARRAYS=shared)
    checkpoint, unreceived = None, 0
    for mpi, network in (("openmpi", "tcp"), ("mpich", "ofi"), ("impi", "tcp")):
        stopped = job.stay(Placement(mpi, network), checkpoint=checkpoint, watch=stop_after(0.5))
        assert stopped.outcome.state == "stopped" and stopped.last_checkpoint is not None, job.events
        unreceived += stopped.last_checkpoint["caught"].get("messages nobody had received", 0)
        checkpoint = job.folder.checkpoint(None)
    assert unreceived >= 16, "one stop at least is between the sends and the receives"
    ended = job.stay(Placement("mpich", "ofi"), checkpoint=checkpoint)
    assert ended.outcome.state == "finished", job.events
    assert job.answer == "answer b69e3d6536a027e9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "package", "steps", "answer"),
    [("walkers", "schwimmbad", 30, "answer 75d448d7b64c7afc"), ("executor", "mpipool", 200, "answer 552569090")],
)
def test_programs_on_packages_of_others_are_carried(
    job: Job, program: str, package: str, steps: int, answer: str
) -> None:
    if not (FOREIGN / package).is_dir():
        pytest.skip(f"needs {package}, which `make mpi` installs")
    job.create(program, steps, 0.03)
    assert job.stay("mpich", watch=stop_after(1.5)).outcome.state == "stopped", job.events
    ended = job.stay("openmpi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == answer


@pytest.mark.slow
def test_a_job_goes_on_after_a_checkpoint_and_can_go_back_to_it(job: Job) -> None:
    job.create("ring", 30, 0.05)
    watch = ending_once(job, lambda coordinator: coordinator.last_checkpoint is not None, stop_after(0.4, stop=False))
    ended = job.stay("mpich", watch=watch)
    assert ended.outcome.state == "finished", job.events
    assert ended.last_checkpoint is not None and ended.last_checkpoint["ending"] == "resumed"
    assert job.answer == _ANSWERS["ring"]
    # Its output is cut back to what it was at the checkpoint, and written again.
    again = job.stay("openmpi", checkpoint=job.folder.checkpoint(None))
    assert again.outcome.state == "finished", job.events
    assert job.answer == _ANSWERS["ring"]


@pytest.mark.slow
def test_periodic_checkpoints_are_taken_and_the_last_ones_kept(job: Job) -> None:
    job.create("jacobi", 30, 0.1)
    watch = ending_once(job, lambda coordinator: (coordinator.last_checkpoint or {"number": 0})["number"] >= 3)
    ended = job.stay("mpich", settings=RunSettings(every_s=0.4, keep=2), watch=watch)
    assert ended.outcome.state == "finished", job.events
    numbers = [each.number for each in job.folder.checkpoints()]
    assert len(numbers) == 2 and numbers[1] >= 3, job.events
    assert job.answer == _ANSWERS["jacobi"]


@pytest.mark.netns
@pytest.mark.parametrize(("mpi", "network"), [("openmpi", "tcp"), ("mpich", "ofi"), ("mpich", "ucx"), ("impi", "tcp")])
@pytest.mark.parametrize("places", [(2, 2), (1, 3)], ids=str)
def test_what_ranks_send_to_other_hosts_crosses_their_wires(
    job: Job, mpi: str, network: str, places: tuple[int, ...]
) -> None:
    rounds, num_bytes = 4, 4 << 20
    job.create("bulk", rounds, num_bytes)
    hosts = tuple(Host(f"host{number}", count) for number, count in enumerate(places))
    ended = job.stay(Placement(mpi, network, hosts, "full"))
    assert ended.outcome.state == "finished", job.events
    # In a ring over two hosts each of them hands every message of one rank to the other one.
    assert min(ended.nic_bytes.values()) >= rounds * num_bytes
    assert max(ended.nic_bytes.values()) < 2 * rounds * num_bytes


@pytest.mark.netns
def test_a_job_moves_to_hosts_and_back(job: Job) -> None:
    job.create("cg", 30, 0.05)
    hosts = (Host("a", 1), Host("b", 3))
    assert job.stay("openmpi", watch=stop_after(0.3)).outcome.state == "stopped", job.events
    moved = job.stay(
        Placement("impi", None, hosts, "full"), checkpoint=job.folder.checkpoint(None), watch=stop_after(0.3)
    )
    assert moved.outcome.state == "stopped", job.events
    ended = job.stay("mpich", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == _ANSWERS["cg"]


@pytest.mark.netns
@pytest.mark.parametrize("program", ["windows", "files"])
def test_windows_and_files_move_from_hosts_to_other_hosts_and_back(job: Job, program: str) -> None:
    job.create(program, 30, 0.05)
    two, four = (Host("a", 2), Host("b", 2)), tuple(Host(name, 1) for name in "abcd")
    checkpoint = None
    for mpi, hosts in (("mpich", two), ("openmpi", four), ("impi", two)):
        placement = Placement(mpi, None, hosts, "full")
        stopped = job.stay(placement, checkpoint=checkpoint, watch=stop_after(0.4))
        assert stopped.outcome.state == "stopped", job.events
        checkpoint = job.folder.checkpoint(None)
    ended = job.stay("mpich", checkpoint=checkpoint)
    assert ended.outcome.state == "finished", job.events
    assert job.answer == _ANSWERS[program]
