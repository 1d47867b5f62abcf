"""Compressors for ``horovod.tensorflow``, in ``tf.function`` and eagerly.

Pass one as ``compression=`` to ``hvd.DistributedGradientTape``; Horovod itself stays as it is.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import ErrorFeedback
from hvd_compress.codecs.frontends import compressors
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.auto import Auto
from hvd_compress.tensorflow.compressor import Compressor
from hvd_compress.tensorflow.joining import join

# OneBit, Int8 and so on, and Compression; __init__.pyi lists them.
_made = compressors(
    __name__, Compressor, Auto, methods=("compress", "decompress"), write="compression={}"
)
globals().update(_made)

__all__ = ["Auto", "Compressor", "ErrorFeedback", "ExchangeError", "join", *_made]
