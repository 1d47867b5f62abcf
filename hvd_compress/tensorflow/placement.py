"""On which device a compressor's gradients are encoded and decoded.

TensorFlow places an operation where it has a kernel, and prefers GPUs; a resource is where it was made. Our
operations take several resources, of which the ledger is the host's and the residual is where the
gradient is. So none of this is left to TensorFlow: residuals and the operations that use them are put on
one device, and what the host has to know is kept on the host.
"""

from __future__ import annotations

import tensorflow as tf

HOST = "CPU:0"
"""Where a step is begun and counted, and what has no kernels for GPUs is encoded."""


def choose(wanted: str | None, what: str, on_gpu: bool) -> str:
    """The device of a compressor's gradients.

    Args:
        wanted: the user's; None is the first GPU that TensorFlow has, if any, or the host.
        what: the exchange or the codec that decides ``on_gpu``, for the message.
        on_gpu: whether there are kernels for GPUs; without, None is the host.

    Returns:
        ``"GPU:0"``, for example.

    Raises:
        ValueError: TensorFlow has no such device, or there are no kernels for it.
    """
    if wanted is None:
        return "GPU:0" if on_gpu and tf.config.list_logical_devices("GPU") else HOST
    devices = tf.config.list_logical_devices()
    there = {f"{device.device_type}:{device.name.rpartition(':')[2]}" for device in devices}
    kinds = ("CPU", "GPU") if on_gpu else ("CPU",)
    usable = sorted(name for name in there if name.startswith(kinds))
    if wanted not in usable:
        raise ValueError(f"Compressor.device: expected one of {usable} for {what}, got {wanted!r}")
    return wanted


def is_gpu(device: str) -> bool:
    """Whether a device of :func:`choose` is a GPU."""
    return device.startswith("GPU")
