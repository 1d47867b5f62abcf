"""The device on which a compressor's gradients are encoded and decoded.

TensorFlow places an operation where it has a kernel, and prefers GPUs; a resource stays where it was made.
Our operations take several resources: the ledger is on the host, and the residual is on the gradient's
device. So none of this is left to TensorFlow: residuals and the operations that use them are put on
one device, and the data that the host has to know is kept on the host.
"""

from __future__ import annotations

import tensorflow as tf

HOST = "CPU:0"
"""The device on which steps are begun and counted, and on which operations without GPU kernels run."""


def choose(wanted: str | None, what: str, on_gpu: bool) -> str:
    """The device of a compressor's gradients.

    Args:
        wanted: the user's choice; None is TensorFlow's first GPU, or the host if there is none.
        what: the exchange or the codec that decides ``on_gpu``, for the message.
        on_gpu: whether there are kernels for GPUs; if not, None means the host.

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
