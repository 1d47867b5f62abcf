"""Compressors for models that PyTorch's FSDP2 shards within a host and replicates between hosts (HSDP).

``hvdc.Compressor(model, OneBit(), mesh=mesh)`` replaces FSDP2's own all-reduce between the replicas. Needs
no Horovod.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import ErrorFeedback, PayloadError
from hvd_compress.codecs.calls import point_to_codecs
from hvd_compress.engine.owner_steps import AdaGrad, OwnerStep
from hvd_compress.fsdp.all_gather import CompressedAllGather
from hvd_compress.fsdp.auto import Auto
from hvd_compress.fsdp.compressor import Compressor
from hvd_compress.fsdp.reduce_scatter import CompressedReduceScatter
from hvd_compress.process_group.stateful import RankStates
from hvd_compress.ranks.errors import ExchangeError

__all__ = [
    "AdaGrad",
    "Auto",
    "CompressedAllGather",
    "CompressedReduceScatter",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "OwnerStep",
    "PayloadError",
    "RankStates",
]

point_to_codecs(__name__)
