"""Compressors for PyTorch's ``DistributedDataParallel``, as communication hooks.

Needs no Horovod: ``compressor = hvd_compress.ddp.register(model, Int8())``.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import ErrorFeedback, PayloadError
from hvd_compress.codecs.calls import point_to_codecs
from hvd_compress.ddp.auto import Auto
from hvd_compress.ddp.compressor import Compressor, hook
from hvd_compress.ddp.gathered import GatheredState
from hvd_compress.ddp.register import register
from hvd_compress.engine.owner_steps import AdaGrad, OwnerStep
from hvd_compress.process_group.stateful import RankStates
from hvd_compress.ranks.errors import ExchangeError

__all__ = [
    "AdaGrad",
    "Auto",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "GatheredState",
    "OwnerStep",
    "PayloadError",
    "RankStates",
    "hook",
    "register",
]

point_to_codecs(__name__)
