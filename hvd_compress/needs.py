"""The packages that each frontend needs, with a message for each missing one.

A frontend's first statement calls :func:`need`. So a failing import says what to install, and not only the
name of the module that happens to be imported first.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

_TORCH = ("torch", "PyTorch: pip install torch")
_TENSORFLOW = (
    "tensorflow",
    "TensorFlow: pip install tensorflow-cpu, or tensorflow on a machine with a GPU",
)
_KERAS = ("keras", "Keras 3: pip install keras")
_HOROVOD = "Horovod 0.28.1; python -m hvd_compress.horovod_wheel builds it"

_NEEDS = {
    "hvd_compress.distributed": (_TORCH,),
    "hvd_compress.ddp": (_TORCH,),
    "hvd_compress.diloco": (_TORCH,),
    "hvd_compress.optim": (_TORCH,),
    "hvd_compress.papers": (_TORCH,),
    "hvd_compress.fsdp": (_TORCH,),
    "hvd_compress.lightning": (_TORCH, ("lightning", "Lightning: pip install lightning")),
    "hvd_compress.transformers": (
        _TORCH,
        ("transformers", "Transformers and Accelerate: pip install transformers accelerate"),
        ("accelerate", "Accelerate: pip install accelerate"),
    ),
    "hvd_compress.torch": (
        _TORCH,
        ("horovod", f"{_HOROVOD}. Without Horovod, use hvd_compress.ddp"),
    ),
    "hvd_compress.tensorflow": (_TENSORFLOW, ("horovod", _HOROVOD)),
    "hvd_compress.keras": (_TENSORFLOW, _KERAS, ("horovod", _HOROVOD)),
}


def need(frontend: str) -> None:
    """Checks that the packages of a frontend are installed, without importing them.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    for module, what in _NEEDS[frontend]:
        if module not in sys.modules and find_spec(module) is None:
            raise ModuleNotFoundError(f"{frontend} needs {what}", name=module)
