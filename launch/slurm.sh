#!/bin/bash
# One run on one Slurm node: sbatch launch/slurm.sh --config=configs/search_r1.py:qwen2.5-3b --config.workdir=DIR
# When the time limit comes near, SIGTERM makes the run save and exit; the same command resumes it. B: the run is the
# batch shell itself, which Slurm tells nothing otherwise.
#SBATCH --job-name=jaxagent
#SBATCH --nodes=1
#SBATCH --gres=gpu:4
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail
exec python -m jaxagent.main "$@"
