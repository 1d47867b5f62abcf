"""Optimizers whose own state is what ranks exchange, for those that compressed gradients do not suit."""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.optim.onebit_adam import OneBitAdam

__all__ = ["OneBitAdam"]
