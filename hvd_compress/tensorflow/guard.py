"""Notices, while Horovod makes a tape or optimizer, that it cannot use or will ignore a compressor.

Under Keras 3, ``horovod.tensorflow.keras.DistributedOptimizer`` overrides methods that Keras never calls:
ranks train apart, and no method of the compressor is called that could report it. But Horovod puts the
compressor into the key of a cache while a tape or optimizer is made, and so calls its ``__hash__``.
"""

from __future__ import annotations

import sys
from typing import Any

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.reduction import check_operation


def check_who_hashes() -> None:
    """Checks the tape or optimizer of Horovod that asks for the hash; called from ``__hash__``.

    Raises:
        ExchangeError: it is Horovod's ``DistributedOptimizer`` with an optimizer of Keras 3; or its ``op``
            is not possible on compressed gradients.
    """
    frame: Any = sys._getframe(2)
    if frame.f_globals.get("__name__") != "horovod.tensorflow.util":
        return
    while frame is not None:
        if frame.f_code.co_name == "_make_allreduce_grads_fn":
            check_operation(frame.f_locals["op"])
        if frame.f_code.co_name == "create_distributed_optimizer":
            _check(frame.f_locals["optimizer"])
            return
        frame = frame.f_back


def _check(optimizer: Any) -> None:
    # By the optimizer: tf_keras's may come when Keras 3 is installed, and even imported, as well.
    packages = {one.__module__.partition(".")[0] for one in type(optimizer).__mro__}
    version = sys.modules["keras"].__version__ if "keras" in packages else "2"
    if int(version.split(".")[0]) >= 3:
        raise ExchangeError(
            f"expected legacy Keras with Horovod's own DistributedOptimizer, got Keras {version}, under "
            f"which it exchanges nothing: use hvd_compress.keras.DistributedOptimizer(optimizer, "
            f"compression=...), or set TF_USE_LEGACY_KERAS=1 and install tf_keras"
        )
