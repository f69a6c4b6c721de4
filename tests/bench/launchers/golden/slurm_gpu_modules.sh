#!/bin/bash -l
# paper-1121-a1b2c3. zeroscale writes this script when it submits the job (not in a dry run), with: sbatch /shared/my_project/results/paper/jobs/paper-1121-a1b2c3/job.sh
#SBATCH --job-name=paper-1121-a1b2c3
#SBATCH --output=/shared/my_project/results/paper/jobs/paper-1121-a1b2c3/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/zeroscale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=128
#SBATCH --mem=0
#SBATCH --gres=gpu:a100:8
#SBATCH --exclusive
#SBATCH --time=90
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --partition=gpu
#SBATCH --account=my_project
#SBATCH --qos=normal
#SBATCH --nice=100
#SBATCH --dependency=afterany:12:13
#SBATCH --exclude=gpu07
#SBATCH --mail-type=FAIL

set -euo pipefail
export HF_HUB_OFFLINE=1
export NCCL_IB_HCA=mlx5
set +u # modules and scripts that activate an environment may read unset variables
module purge # modules loaded in the submitting shell must not affect the job
module load gcc/13.2
module load cuda/12.8
set -u
export HF_HUB_OFFLINE=1  # again, because a module may have changed them
export NCCL_IB_HCA=mlx5

exec srun --kill-on-bad-exit=1 --export=ALL --nodes=2 --ntasks-per-node=1 --cpus-per-task=128 --cpu-bind=none --gpu-bind=none \
    /shared/my_project/zeroscale/.venv/bin/python -P -m bench.sweep.allocation /shared/my_project/results/paper/jobs/paper-1121-a1b2c3
