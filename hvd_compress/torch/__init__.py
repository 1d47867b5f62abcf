"""Compressors for ``horovod.torch``.

Pass one as ``compression=`` to ``hvd.DistributedOptimizer``; Horovod itself stays as it is.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import ErrorFeedback, PayloadError
from hvd_compress.codecs.frontends import compressors
from hvd_compress.engine.owner_steps import AdaGrad, OwnerStep
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.torch.auto import Auto
from hvd_compress.torch.compressor import Compressor

# OneBit, Int8 and so on, and Compression; __init__.pyi lists them.
_made = compressors(
    __name__, Compressor, Auto, methods=("compress", "decompress"), write="compression={}"
)
globals().update(_made)

__all__ = [
    "AdaGrad",
    "Auto",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "OwnerStep",
    "PayloadError",
    *_made,
]
