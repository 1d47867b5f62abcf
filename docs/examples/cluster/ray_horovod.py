"""Runs Horovod's first script, docs/examples/torch_quickstart.py, on two of Ray's workers.

Start it with: python docs/examples/cluster/ray_horovod.py
"""

import runpy
from pathlib import Path

import ray
from horovod.ray import RayExecutor

SCRIPT = str(Path(__file__).parent.parent / "torch_quickstart.py")


def train() -> None:
    runpy.run_path(SCRIPT)


if __name__ == "__main__":
    ray.init()  # On a cluster's head node, this connects to the cluster.
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), num_workers=2)
    executor.start()
    executor.run(train)
    executor.shutdown()
