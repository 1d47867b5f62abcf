"""Training with few exchanges: every rank trains by itself, and differences of parameters are averaged.

For links so slow that one exchange a step does not pay, however small it is.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.diloco.diloco import DiLoCo

__all__ = ["DiLoCo"]
