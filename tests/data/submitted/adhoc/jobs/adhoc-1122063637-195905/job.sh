#!/usr/bin/env bash
# adhoc-1122063637-195905, written by zeroscale. To submit it by hand: sbatch /shared/results/adhoc/jobs/adhoc-1122063637-195905/job.sh
#SBATCH --job-name=adhoc-1122063637-195905
#SBATCH --output=/shared/results/adhoc/jobs/adhoc-1122063637-195905/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/zeroscale
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=55
#SBATCH --signal=TERM@60
#SBATCH --requeue

set -euo pipefail

exec srun --kill-on-bad-exit=1 --export=ALL --nodes=1 --ntasks-per-node=1 \
    /shared/zeroscale/.venv/bin/python3 -m bench.sweep.allocation /shared/results/adhoc/jobs/adhoc-1122063637-195905
