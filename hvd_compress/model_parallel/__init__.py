"""Model parallelism with encoded activations: linear layers with weights that are split over ranks.

:class:`ColumnParallelLinear` and :class:`RowParallelLinear` exchange activations in the forward pass and
error signals in the backward pass as payloads of this package's codecs (Dettmers, 2016, sections 2.2 to
2.4 and 3.4).
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import PayloadError
from hvd_compress.model_parallel.functions import (
    copy_to_parallel,
    gather_batch,
    gather_from_parallel,
    reduce_from_parallel,
    reduce_scatter_batch,
    scatter_to_parallel,
)
from hvd_compress.model_parallel.group import ParallelGroup
from hvd_compress.model_parallel.layers import ColumnParallelLinear, RowParallelLinear
from hvd_compress.process_group.transport import ProcessGroupTransport, Transport
from hvd_compress.ranks.errors import ExchangeError

__all__ = [
    "ColumnParallelLinear",
    "ExchangeError",
    "ParallelGroup",
    "PayloadError",
    "ProcessGroupTransport",
    "RowParallelLinear",
    "Transport",
    "copy_to_parallel",
    "gather_batch",
    "gather_from_parallel",
    "reduce_from_parallel",
    "reduce_scatter_batch",
    "scatter_to_parallel",
]
