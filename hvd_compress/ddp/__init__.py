"""Compressors for PyTorch's ``DistributedDataParallel``, as communication hooks.

Needs no Horovod: ``model.register_comm_hook(compressor, hvd_compress.ddp.hook)``.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import ErrorFeedback, PayloadError
from hvd_compress.codecs.frontends import compressors
from hvd_compress.ddp.auto import Auto
from hvd_compress.ddp.compressor import Compressor
from hvd_compress.ddp.gathered import GatheredState
from hvd_compress.ddp.hook import hook
from hvd_compress.engine.owner_steps import AdaGrad, OwnerStep
from hvd_compress.ranks.errors import ExchangeError

# OneBit, Int8 and so on, and Compression; __init__.pyi lists them.
_made = compressors(__name__, Compressor, Auto)
globals().update(_made)

__all__ = [
    "AdaGrad",
    "OwnerStep",
    "Auto",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "GatheredState",
    "PayloadError",
    "hook",
    *_made,
]
