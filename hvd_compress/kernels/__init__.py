"""Kernels, which run codecs on each kind of device behind one interface."""
