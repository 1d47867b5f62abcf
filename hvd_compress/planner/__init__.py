"""The planner, which chooses a route for each gradient from probes, predictions and the times of steps.

The planner does not depend on a framework or its collectives. A frontend gives
:class:`~hvd_compress.planner.planner.Planner` a function that sums small vectors over the ranks, a
:class:`~hvd_compress.planner.probing.Prober`, and the time of each step. Ranks share all measurements, and
make the same decisions from the same numbers.
"""
