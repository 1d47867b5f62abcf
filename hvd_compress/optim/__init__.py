"""Optimizers whose state the ranks exchange."""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.optim.onebit_adam import OneBitAdam

__all__ = ["OneBitAdam"]
