"""A performance model of data-parallel training: what an exchange of gradients costs, before it is run.

:mod:`~hvd_compress.perfmodel.cost` is about one tensor; the rest about whole networks and clusters. Nothing
here knows a framework.
"""
