"""Optimizers that exchange their state, and the other parts of 1-bit SGD's system around an optimizer."""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.optim.double_buffering import DoubleBuffering
from hvd_compress.optim.onebit_adam import OneBitAdam

__all__ = ["DoubleBuffering", "OneBitAdam"]
