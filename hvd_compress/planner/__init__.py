"""The planner decides how each gradient travels, from probes, predictions and the times of steps.

It knows no framework and no collective. A frontend gives :class:`~hvd_compress.planner.planner.Planner` a
sum of small vectors over the ranks, a :class:`~hvd_compress.planner.probing.Prober`, and the time of each
step. Ranks share all measurements, and decide the same from the same numbers.
"""
