"""Elastic Horovod, in every framework: what becomes of unsent gradients when ranks come and go."""
