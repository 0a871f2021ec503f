#!/bin/bash
# A run of many processes on Slurm; `bash launch/slurm_fleet.sh --help` says everything.
#
#   sbatch --nodes=4 launch/slurm_fleet.sh --config=configs/search_r1.py:qwen2.5-3b --config.workdir=/shared/runs/a
#SBATCH --job-name=jaxagent
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --gres=gpu:4
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
exec "${PYTHON:-python}" -m jaxagent.launch.slurm_fleet "$@"
