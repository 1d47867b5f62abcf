"""Every experiment, by the name that the command line uses, in the order of docs/papers.md."""

from __future__ import annotations

from benchmarks.papers import (
    ecq_codes,
    ecq_large,
    ecq_linear,
    ecq_real,
    ecq_sweep,
    int8_errors,
    int8_layers,
    int8_parallel,
    onebit_adagrad,
    onebit_batch_size,
    onebit_feedback,
    terngrad_clipping,
    terngrad_sharing,
    terngrad_tables,
    terngrad_workers,
)
from benchmarks.papers.experiment import Experiment

_ALL = (
    int8_errors.EXPERIMENT,
    int8_layers.EXPERIMENT,
    int8_parallel.EXPERIMENT,
    ecq_linear.EXPERIMENT,
    ecq_large.EXPERIMENT,
    ecq_real.EXPERIMENT,
    ecq_codes.EXPERIMENT,
    ecq_sweep.EXPERIMENT,
    terngrad_workers.EXPERIMENT,
    terngrad_clipping.EXPERIMENT,
    terngrad_sharing.EXPERIMENT,
    terngrad_tables.EXPERIMENT,
    onebit_feedback.EXPERIMENT,
    onebit_adagrad.EXPERIMENT,
    onebit_batch_size.EXPERIMENT,
)

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
