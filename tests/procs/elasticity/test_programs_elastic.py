"""Programs that people write, converted by the documentation alone and killed wherever they are."""

from pathlib import Path

import pytest

from tests.procs.forked_job import ForkedJob
from tests.procs.scripts import programs
from tests.support.hold import Hold

pytestmark = pytest.mark.procs
SCRIPT = str(Path(programs.__file__))
QUIET_S = 90.0
STEP = 6
"""A step at which every program comes to each of its places."""
FAST = {("language", "evaluation"), ("language", "stepped"), ("adversarial", "evaluation"), ("policy", "behind")}
"""Where state is lost most easily: behind the optimizer's step, and where an epoch ends."""
CASES = [
    pytest.param(program, place, marks=() if (program, place) in FAST else pytest.mark.slow, id=f"{program}-{place}")
    for program, places in programs.PLACES.items()
    for place in places
]


def ends(job: ForkedJob) -> set[str]:
    """What the program has come to, on every rank; rounded, for sums over other numbers of ranks round otherwise."""
    return {f"{event['checksum']:.9e}" for event in job.of_kind("end")}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What each program comes to if nothing happens to it."""
    found = {}
    for program in programs.PLACES:
        with ForkedJob(tmp_path_factory.mktemp(program), [SCRIPT, program], nnodes="1") as job:
            job.start_node("a")
            assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
            found[program] = ends(job)
            assert len(found[program]) == 1
    return found


@pytest.mark.parametrize(("program", "place"), CASES)
def test_a_program_that_loses_a_rank_anywhere_comes_to_the_same_end(
    tmp_path: Path, calm: dict[str, set[str]], program: str, place: str
) -> None:
    """Nobody takes a snapshot and nobody saves: two whole copies are alive, and nothing is done twice."""
    # The last place of an epoch comes behind its last step.
    step = 8 if program == "policy" and place in ("rollout", "evaluation", "behind") else STEP
    hold = Hold(tmp_path, step)
    words = [SCRIPT, program, "--at", place, *hold.flags]
    with ForkedJob(tmp_path, words, nnodes="1", workers_per_node=3) as job:
        job.start_node("a")
        hold.wait(job, 1, QUIET_S)
        job.kill_worker("a", 1)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        assert ends(job) == calm[program]
        later = [event for event in job.of_kind("filled") if event["generation"] > 1]
        assert later and {event["source"] for event in later} == {"peers"}
