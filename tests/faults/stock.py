"""Jobs without this package, on the same gradients as those with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.contract.cases import SHAPES
from tests.contract.frontend import Arrays

Step = Callable[[Arrays], object]


def make(frontend: str) -> Step:
    """A step of the framework's own exchange."""
    return _STEPS[frontend]()


def _tensors(gradients: Arrays) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.array(g)) for name, g in gradients.items()}


def _torch() -> Step:
    import horovod.torch as hvd

    from tests.torch.probes import distributed, exchange
    from tests.torch_models import Probe

    model = Probe(SHAPES)
    optimizer = distributed(model, hvd.Compression.none)
    return lambda gradients: exchange(model, optimizer, _tensors(gradients))


def _tensorflow() -> Step:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES.values()]

    @tf.function
    def step(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            parts = [tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)]
            loss = tf.add_n(parts)
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    return lambda gradients: step([tf.constant(gradients[name]) for name in SHAPES])


def _ddp() -> Step:
    from torch.nn.parallel import DistributedDataParallel

    from tests.ddp.probes import exchange
    from tests.torch_models import Probe

    ddp = DistributedDataParallel(Probe(SHAPES), bucket_cap_mb=0.01)
    return lambda gradients: exchange(ddp, _tensors(gradients))


def _distributed() -> Step:
    import torch.distributed as dist

    def step(gradients: Arrays) -> None:
        for tensor in _tensors(gradients).values():
            dist.all_reduce(tensor)

    return step


_STEPS = {"torch": _torch, "tensorflow": _tensorflow, "ddp": _ddp, "distributed": _distributed}
