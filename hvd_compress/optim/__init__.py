"""Optimizers whose state is what ranks exchange, and what surrounds an optimizer in 1-bit SGD's system."""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.optim.double_buffering import DoubleBuffering
from hvd_compress.optim.onebit_adam import OneBitAdam

__all__ = ["DoubleBuffering", "OneBitAdam"]
