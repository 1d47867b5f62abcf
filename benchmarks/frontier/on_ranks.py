"""PowerSGD by PyTorch's hook in DDP, on real ranks that train by the recipe of the simulated workers."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.papers.experiment import Advance
from benchmarks.papers.training import Recipe, Run
from benchmarks.rivals.powersgd import ONE_BUCKET, PowerSGD


def train(settings: tuple[Recipe, dict[str, Any]], advance: Advance) -> dict[str, Any]:
    """Trains on one rank with its part of each mini-batch; a tick for each step.

    Args:
        settings: the recipe, and the options of :class:`benchmarks.rivals.powersgd.PowerSGD`.
        advance: called after each step.

    Returns:
        Accuracy and mean loss on the test images, the loss on the training images, and the bits an
        element, mean over the steps.
    """
    recipe, options = settings
    run = Run(recipe)
    hook = PowerSGD(**options)
    model = DistributedDataParallel(run.model, bucket_cap_mb=ONE_BUCKET)
    model.register_comm_hook(None, hook.hook)
    rank = dist.get_rank()
    for step, (x, y) in enumerate(run.batches()):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[rank]), y[rank]).backward()
        run.update(step)
        advance()
    elements = recipe.steps * sum(math.prod(shape) for shape in run.shapes.values())
    return {**run.scores(), "bits": 8 * hook.counters.message_bytes / elements}
