#!/bin/bash
#SBATCH --job-name=compressed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# Horovod with MPI: Open MPI asks Slurm for the nodes, and for how many ranks each of them has.
set -euo pipefail

mpirun --bind-to none --map-by slot --mca pml ob1 --mca btl ^openib -x PATH -x PYTHONPATH \
    python docs/examples/torch_quickstart.py
