#!/bin/bash
#SBATCH --job-name=compressed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# One torchrun a node, which starts one rank for each GPU, or for each --nproc-per-node.
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${RANKS_PER_NODE:-1}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:29400" \
    docs/examples/ddp_quickstart.py
