"""Parts of the papers that are complete in themselves: model parallelism and double buffering.

:class:`ColumnParallelLinear` and :class:`RowParallelLinear` are linear layers with weights that are split
over ranks. They exchange activations in the forward pass and error signals in the backward pass as payloads
of this package's codecs (Dettmers, 2016, sections 2.2 to 2.4 and 3.4). :class:`DoubleBuffering` exchanges
the gradients of one half-batch while the next one is computed (1-bit SGD, Seide et al., 2014, section 2.2).
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import PayloadError
from hvd_compress.papers.double_buffering import DoubleBuffering
from hvd_compress.papers.functions import (
    copy_to_parallel,
    gather_batch,
    gather_from_parallel,
    reduce_from_parallel,
    reduce_scatter_batch,
    scatter_to_parallel,
)
from hvd_compress.papers.group import ParallelGroup
from hvd_compress.papers.layers import ColumnParallelLinear, RowParallelLinear
from hvd_compress.process_group.transport import ProcessGroupTransport, Transport
from hvd_compress.ranks.errors import ExchangeError

__all__ = [
    "ColumnParallelLinear",
    "DoubleBuffering",
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
