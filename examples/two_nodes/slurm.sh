#!/usr/bin/env bash
# Trains on two nodes of eight GPUs under Slurm:
#   sbatch examples/two_nodes/slurm.sh --recipe recipes/dit-xl-2-256.toml --data STORE --out RUN
# Five minutes before the time is over all ranks save a checkpoint and end; submitted again, the job resumes.
#SBATCH --job-name=kiln
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail
KILN_JOB_SECRET=$(openssl rand -hex 32)
export KILN_JOB_SECRET
srun --kill-on-bad-exit=1 "${KILN:-kiln}" train "$@"
