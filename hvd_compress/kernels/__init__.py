"""Kernels: how codecs run, per device, behind one interface."""
