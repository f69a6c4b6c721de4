#!/bin/bash -l
# paper-1121-a1b2c3. zeroscale writes this script when it submits the job (not in a dry run), with: sbatch /shared/my_project/results/paper/jobs/paper-1121-a1b2c3/job.sh
#SBATCH --job-name=paper-1121-a1b2c3
#SBATCH --output=/shared/my_project/results/paper/jobs/paper-1121-a1b2c3/slurm-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/zeroscale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --mem=480G
#SBATCH --gpus-per-node=8
#SBATCH --time=90
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --partition=batch
#SBATCH --account=my_project
#SBATCH --array=0-29%4

set -euo pipefail
export ZEROSCALE_CONTAINER_DIGEST=/shared/my_project/images/zeroscale.sqsh

exec srun --kill-on-bad-exit=1 --export=ALL --nodes=2 --ntasks-per-node=1 --cpus-per-task=96 --cpu-bind=none --gpu-bind=none --mpi=none \
    --container-image=/shared/my_project/images/zeroscale.sqsh --container-mounts=/shared/my_project/results/paper:/shared/my_project/results/paper,/shared/my_project/data:/data:ro --no-container-mount-home \
    python3 -P -m bench.sweep.allocation /shared/my_project/results/paper/jobs/paper-1121-a1b2c3
