"""What Horovod's optimizers and tapes hear of a ``compression`` that is none."""

from __future__ import annotations

from typing import NoReturn


def refuse(got: str, codec: str) -> NoReturn:
    """Raises ``TypeError``: for what Horovod has called ``compress``.

    Args:
        got: what was given as ``compression``.
        codec: what stands in the codec's place in the line to write.
    """
    raise TypeError(
        f"compression: expected a compressor of Horovod's frontends, got {got}: write "
        f"compression=hvdc.Compressor(model, {codec}) with hvd_compress.torch, or "
        f"hvdc.Compressor({codec}) with hvd_compress.tensorflow"
    )
