"""Automatic restarts of a failed job, from its newest checkpoint, as often as its user allows.

One run after the other, each led as if its user had started it:

    a run has failed ── did its user end it? is a restart left? ──> its newest whole checkpoint ──> the next run
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from remesh.carried.rounds.job_folder import Checkpoint, JobFolder
from remesh.carried.rounds.leader import JobOutcome

logger = logging.getLogger(__name__)

Run = Callable[[Checkpoint | None], JobOutcome]
"""Leads the job from a checkpoint, or None for its program's beginning, until it ends or stops."""


def run_with_restarts(run: Run, folder: JobFolder, checkpoint: Checkpoint | None, max_restarts: int) -> JobOutcome:
    """Lead a job until a run ends well, its user ends it, or all restarts are used up; returns the last outcome.

    A restart continues from the newest whole checkpoint of these runs. Until they have taken one it begins where the
    first of them did, also if newer ones are there: who goes back to an older checkpoint does not want those. A program
    that has none is not begun anew: it would do a second time what it has done, and its user may not notice.
    """
    earlier = {each.number for each in folder.checkpoints()}
    for restart in itertools.count(1):
        outcome = run(checkpoint)
        if outcome.state != "failed" or outcome.is_wanted or restart > max_restarts:
            return outcome
        taken = [each for each in folder.checkpoints() if each.number not in earlier and not each.problem]
        checkpoint = taken[-1] if taken else checkpoint
        if checkpoint is None:
            logger.warning("there is no checkpoint to continue from; --every takes some")
            return outcome
        said = f"failed: {outcome.cause}; restart {restart} of {max_restarts}, from checkpoint {checkpoint.number}"
        folder.log_event(said)
        logger.warning("%s", said)
    raise AssertionError("unreachable: counting does not end")
