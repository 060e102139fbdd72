#!/usr/bin/env bash
# A training that lives on when nodes die, under Slurm:  sbatch examples/deploy/slurm.sh train.py
# One agent on each node; the first node of the allocation hosts the store.
#SBATCH --job-name=train
#SBATCH --nodes=2-4              # any number in this range will do
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue                # after a pre-emption the job starts again, from its newest checkpoint
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120        # two minutes before the end: state is handed over or saved, then the agents leave
#SBATCH --no-kill                # a node that fails does not take the allocation with it
set -euo pipefail

script=${1:?usage: sbatch slurm.sh SCRIPT [ARGUMENTS]}
shift
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --no-kill and --kill-on-bad-exit=0: the other agents go on when one is lost.
exec srun --no-kill --kill-on-bad-exit=0 bash -c '
  exec remesh run \
    --nnodes "1:$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-endpoint "$0:29400" \
    --rdzv-id "$SLURM_JOB_ID" \
    --local-addr "$(hostname --ip-address | cut -d " " -f 1)" \
    --events-dir "runs/$SLURM_JOB_ID/events" \
    "$@"' "$head_node" "$script" "$@"
