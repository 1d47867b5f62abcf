#!/bin/bash
#SBATCH --job-name=compressed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# One task a rank, without torchrun: the script reads torch.distributed's variables.
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500 WORLD_SIZE=$SLURM_NTASKS
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python docs/examples/ddp_quickstart.py'
