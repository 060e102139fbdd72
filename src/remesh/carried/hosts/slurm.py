"""Batch script for Slurm: a job that is stopped before its time is up, and queues itself again.

Slurm sends SIGTERM ahead of the time limit to the batch shell alone, which hands it on to the job's leader: that takes
a checkpoint and stops. The same script goes on from the last checkpoint when it runs the next time.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_AHEAD_S = 600
"""Time before the limit at which Slurm signals: a checkpoint has to be written in it."""

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --ntasks={num_ranks}
#SBATCH --signal=B:TERM@{ahead_s}
#SBATCH --requeue
#SBATCH --open-mode=append

# One entry for each host with the tasks that Slurm gave it.
hosts=$(srun --ntasks={num_ranks} hostname | sort | uniq -c | awk '{{ printf "%s%s:%s", sep, $2, $1; sep = "," }}')

if compgen -G {images}/'{six_digits}' > /dev/null; then
  remesh {verb} restart {job} {options}--hosts "$hosts" &
else
  if [ -e {job} ]; then mv {job} {job}.failed.$SLURM_JOB_ID; fi
  remesh {verb} run {size}{options}--hosts "$hosts" --job {job} {command} &
fi
leader=$!
trap 'kill -TERM $leader' TERM
wait $leader
status=$?
# A signal ends the first wait; the second one is for the checkpoint.
if [ $status -gt 128 ]; then wait $leader; status=$?; fi
if grep -q '"state": "stopped"' {job}/state.json; then scontrol requeue $SLURM_JOB_ID; fi
exit $status
"""


@dataclass(frozen=True, slots=True)
class BatchLaunch:
    """The launch of programs of one kind."""

    verb: str
    """The verb of `remesh` for the kind."""
    size: tuple[str, ...] = ()
    """The options of ``run`` that set how many ranks there are, where hosts do not."""
    options: tuple[str, ...] = ()
    """The options of ``run`` and ``restart``."""


def make_script(num_ranks: int, launch: BatchLaunch, job: str, command: Sequence[str]) -> str:
    """Make the text of the script.

    >>> print(make_script(4, BatchLaunch("torch"), "/scratch/j", ["train.py", "a b"]).splitlines()[2])
    #SBATCH --ntasks=4
    """
    return _SCRIPT.format(
        name=shlex.quote(job.rstrip("/").rpartition("/")[2]),
        num_ranks=num_ranks,
        ahead_s=_AHEAD_S,
        verb=launch.verb,
        size=_words(launch.size),
        options=_words(launch.options),
        job=shlex.quote(job),
        images=shlex.quote(f"{job}/images"),
        six_digits="[0-9]" * 6,
        command=shlex.join(command),
    )


def _words(options: Sequence[str]) -> str:
    return "".join(f"{shlex.quote(option)} " for option in options)
