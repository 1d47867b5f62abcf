"""A performance model of data-parallel training, which predicts the cost of exchanges of gradients.

:mod:`~hvd_compress.perfmodel.cost` predicts for one tensor; the rest, for whole networks and clusters.
Nothing here depends on a framework.
"""
