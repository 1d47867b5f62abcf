"""Gradient compression for data-parallel training with stock Horovod.

This package imports no framework; take the frontend of yours, ``hvd_compress.torch`` (Horovod) or
``hvd_compress.ddp`` (PyTorch alone).
"""

__version__ = "0.1.0"
