"""The device on which a compressor's gradients are encoded and decoded.

TensorFlow places an operation where it has a kernel, and prefers GPUs; a resource stays where it was made.
Our operations take several resources: the ledger is on the host, and the residual is on the gradient's
device. So none of this is left to TensorFlow: residuals and the operations that use them are put on
one device, and the data that the host has to know is kept on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvd_compress.codecs import Codec
from hvd_compress.kernels.native import spec_of

HOST = "CPU:0"
"""The device on which steps are begun and counted, and on which operations without GPU kernels run."""


def choose(wanted: str | None, codecs: Sequence[Codec]) -> str:
    """The device of a compressor's gradients.

    Args:
        wanted: the user's choice; None is TensorFlow's first GPU, or the host if there is none.
        codecs: the codecs that may encode some gradient; where one has no kernels for GPUs, None means the
            host.

    Returns:
        ``"GPU:0"``, for example.

    Raises:
        ValueError: TensorFlow has no such device, or there are no kernels for it.
    """
    lacking = [c for c in codecs if spec_of(c, ()) is None or not c.on_device]
    if wanted is None:
        return "GPU:0" if not lacking and tf.config.list_logical_devices("GPU") else HOST
    devices = tf.config.list_logical_devices()
    there = {f"{device.device_type}:{device.name.rpartition(':')[2]}" for device in devices}
    kinds = ("CPU",) if lacking else ("CPU", "GPU")
    usable = sorted(name for name in there if name.startswith(kinds))
    if wanted not in usable:
        what = f" for {lacking[0]!r}" if lacking else ""
        raise ValueError(f"Compressor.device: expected one of {usable}{what}, got {wanted!r}")
    return wanted


def is_gpu(device: str) -> bool:
    """Whether a device of :func:`choose` is a GPU."""
    return device.startswith("GPU")
