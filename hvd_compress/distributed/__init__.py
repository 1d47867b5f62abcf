"""A compressed ``all_reduce`` of any tensors among the ranks of a ``torch.distributed`` process group.

Write ``hvdc.all_reduce(tensor, compressor)`` in place of ``torch.distributed.all_reduce(tensor)``. The
other frontends without Horovod are built on this package.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import ErrorFeedback, PayloadError
from hvd_compress.codecs.calls import point_to_codecs
from hvd_compress.distributed.auto import Auto
from hvd_compress.distributed.compressor import Compressor, Work, all_reduce
from hvd_compress.engine.owner_steps import AdaGrad, OwnerStep
from hvd_compress.process_group.stateful import RankStates
from hvd_compress.ranks.errors import ExchangeError

__all__ = [
    "AdaGrad",
    "Auto",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "OwnerStep",
    "PayloadError",
    "RankStates",
    "Work",
    "all_reduce",
]

point_to_codecs(__name__)
