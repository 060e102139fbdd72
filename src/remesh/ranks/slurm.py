"""What does a batch script for Slurm look like? A job that is stopped before its time is up, and queues itself again.

Slurm sends SIGTERM ahead of the time limit to the batch shell alone, which hands it on to who leads the job: that takes
a checkpoint and stops. The same script goes on from the last checkpoint when it runs the next time.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_AHEAD_S = 600
"""Before the time limit: a checkpoint has to be written in it."""

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --ntasks={num_ranks}
#SBATCH --signal=B:TERM@{ahead_s}
#SBATCH --requeue
#SBATCH --open-mode=append

# One entry for each host with the tasks that Slurm gave it.
hosts=$(srun --ntasks={num_ranks} hostname | sort | uniq -c | awk '{{ printf "%s%s:%s", sep, $2, $1; sep = "," }}')

if compgen -G {images}/'[0-9]*' > /dev/null; then
  remesh mpi restart {job} --mpi {mpi} --hosts "$hosts" &
elif [ -e {job} ]; then
  mv {job} {job}.failed.$SLURM_JOB_ID
  remesh mpi run -n {num_ranks} --mpi {mpi} --hosts "$hosts" --job {job} {command} &
else
  remesh mpi run -n {num_ranks} --mpi {mpi} --hosts "$hosts" --job {job} {command} &
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


def make_script(num_ranks: int, mpi: str, job: str, command: Sequence[str]) -> str:
    """The text of the script.

    >>> print(make_script(4, "mpich", "/scratch/j", ["app.py", "a b"]).splitlines()[2])
    #SBATCH --ntasks=4
    """
    return _SCRIPT.format(
        name=shlex.quote(job.rstrip("/").rpartition("/")[2]),
        num_ranks=num_ranks,
        ahead_s=_AHEAD_S,
        mpi=shlex.quote(mpi),
        job=shlex.quote(job),
        images=shlex.quote(f"{job}/images"),
        command=shlex.join(command),
    )
