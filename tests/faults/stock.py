"""Jobs without this package, with the same gradients as those with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.contract.frontend import Arrays

Step = Callable[[Arrays], object]

Shapes = Mapping[str, tuple[int, ...]]

# Horovod's optimizer exchanges nothing under Keras 3.
ENVIRONMENT = {"keras": {"TF_USE_LEGACY_KERAS": "1"}}
"""The environment variables that a framework reads when it is imported, by frontend."""


def make(frontend: str, shapes: Shapes) -> Step:
    """Returns a function that runs a step with the framework's own exchange."""
    return _STEPS[frontend](shapes)


def _tensors(gradients: Arrays) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.array(g)) for name, g in gradients.items()}


def _torch(shapes: Shapes) -> Step:
    import horovod.torch as hvd

    from tests.torch.probes import distributed, exchange
    from tests.torch_models import Probe

    model = Probe(shapes)
    optimizer = distributed(model, hvd.Compression.none)
    return lambda gradients: exchange(model, optimizer, _tensors(gradients))


def _tensorflow(shapes: Shapes) -> Step:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from tests.contract.horovod_tensorflow import taped

    step = tf.function(taped(shapes, "float32", hvd.Compression.none))
    return lambda gradients: step([tf.constant(gradients[name]) for name in shapes])


def _keras(shapes: Shapes) -> Step:
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes.values()]
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))

    @tf.function
    def step(gradients: list[tf.Tensor]) -> None:
        with tf.GradientTape() as tape:
            parts = [tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)]
            loss = tf.add_n(parts)
        optimizer.minimize(loss, variables, tape=tape)

    return lambda gradients: step([tf.constant(gradients[name]) for name in shapes])


def _ddp(shapes: Shapes) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    from tests.ddp.probes import exchange
    from tests.torch_models import Probe

    ddp = DistributedDataParallel(Probe(shapes), bucket_cap_mb=0.01)
    return lambda gradients: exchange(ddp, _tensors(gradients))


def _distributed(shapes: Shapes) -> Step:
    import torch.distributed as dist

    def step(gradients: Arrays) -> None:
        for tensor in _tensors(gradients).values():
            dist.all_reduce(tensor)

    return step


def _fsdp(shapes: Shapes) -> Step:
    from torch.distributed.fsdp import fully_shard

    from tests.faults.of_fsdp import mesh
    from tests.fsdp.probes import Net, backward

    net, all_ranks = Net(shapes), mesh()
    for module in (*net.children(), net):
        fully_shard(module, mesh=all_ranks)
    return lambda gradients: backward(net, _tensors(gradients))


def _diloco(shapes: Shapes) -> Step:
    """Returns a step of local SGD, which averages the ranks' parameters every other step."""
    import torch
    import torch.distributed as dist

    from tests.faults.of_diloco import EVERY
    from tests.torch_models import Probe

    model = Probe(shapes)
    steps = 0

    @torch.no_grad()
    def step(gradients: Arrays) -> None:
        nonlocal steps
        steps += 1
        for name, gradient in _tensors(gradients).items():
            parameter = getattr(model, name)
            parameter.sub_(gradient)
            if steps % EVERY == 0:
                dist.all_reduce(parameter)
                parameter.div_(dist.get_world_size())

    return step


_STEPS = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "ddp": _ddp,
    "distributed": _distributed,
    "keras": _keras,
    "fsdp": _fsdp,
    "diloco": _diloco,
}
