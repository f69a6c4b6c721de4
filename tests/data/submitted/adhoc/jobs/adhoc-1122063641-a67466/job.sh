#!/usr/bin/env bash
# adhoc-1122063641-a67466, written by zeroscale. To submit it by hand: sbatch /shared/results/adhoc/jobs/adhoc-1122063641-a67466/job.sh
#SBATCH --job-name=adhoc-1122063641-a67466
#SBATCH --output=/shared/results/adhoc/jobs/adhoc-1122063641-a67466/slurm-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/zeroscale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=16
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --array=0-1%1

set -euo pipefail

exec srun --kill-on-bad-exit=1 --export=ALL --nodes=2 --ntasks-per-node=1 \
    /shared/zeroscale/.venv/bin/python3 -m bench.sweep.allocation /shared/results/adhoc/jobs/adhoc-1122063641-a67466
