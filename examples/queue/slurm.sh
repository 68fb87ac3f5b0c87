#!/bin/bash
# Workers of one run as an array of jobs: sbatch slurm.sh. Any number may run at a time, and more may be added later.
#SBATCH --array=1-8
#SBATCH --gpus=1
#SBATCH --requeue
#SBATCH --signal=TERM@60

# exit code 3: the run is complete and has error rows
srun pagedcli generate /shared/prompts.jsonl -o /shared/out --queue /shared/job \
  -m Qwen/Qwen3-0.6B --workers 8 || test $? -eq 3
