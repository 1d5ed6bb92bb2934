#!/bin/bash
# One training on several machines of a SLURM cluster, a process for each GPU:
#
#   sbatch experiments/slurm.sh language_modelling --preset gpt2_124m --data.train text.txt --name big
#
# Edit the lines below for your cluster. The folder must be one that all machines share. Two minutes
# before the time limit the run saves its state; the job is queued again and goes on.
#SBATCH --job-name=jaxformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
experiment=$1
shift
srun "${PYTHON:-.venv/bin/python}" -m "experiments.$experiment.train" "$@" --distributed || code=$?
# 143: stopped by a signal, saved.
if [ "${code:-0}" = 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    code=0
fi
exit "${code:-0}"
