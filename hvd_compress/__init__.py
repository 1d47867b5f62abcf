"""Gradient compression for data-parallel training with stock Horovod.

This package imports no framework; take the frontend of yours, such as ``hvd_compress.torch``.
"""

__version__ = "0.1.0"
