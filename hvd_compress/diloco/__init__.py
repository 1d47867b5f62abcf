"""Training with few exchanges: every rank trains by itself, and differences of parameters are averaged.

This is meant for links that are too slow for one exchange per step, however small the exchange is.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.diloco.checkpoint import ShardedState
from hvd_compress.diloco.diloco import AVERAGE, NESTEROV, DiLoCo

__all__ = ["AVERAGE", "NESTEROV", "DiLoCo", "ShardedState"]
