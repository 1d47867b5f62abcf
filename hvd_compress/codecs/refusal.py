"""The error for objects that are passed to Horovod as ``compression`` and are not compressors."""

from __future__ import annotations

from typing import NoReturn


def refuse(got: str, codec: str) -> NoReturn:
    """Raises ``TypeError``, where Horovod calls ``compress`` of such an object.

    Args:
        got: a description of the object.
        codec: the expression for the codec in the line that the message suggests.
    """
    raise TypeError(
        f"compression: expected a compressor of Horovod's frontends, got {got}: write "
        f"compression=hvdc.Compressor(model, {codec}) with hvd_compress.torch, or "
        f"hvdc.Compressor({codec}) with hvd_compress.tensorflow"
    )
