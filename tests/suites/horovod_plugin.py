"""A pytest plugin for Horovod's own tests, which gives each ``DistributedOptimizer`` a compressor.

See README.md. ``HVDC_SUITE`` is ``stock`` or the name of a codec's class, such as ``Int8``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import horovod.torch as hvd
import pytest

import hvd_compress.torch as hvdc

CODEC = os.environ.get("HVDC_SUITE", "stock")

_made = 0
_stock = hvd.DistributedOptimizer


@functools.wraps(_stock)
def _compressed(optimizer: Any, named_parameters: Any = None, **options: Any) -> Any:
    global _made
    if options.get("op", hvd.Average) == hvd.Adasum:  # Adasum takes no compressor.
        return _stock(optimizer, named_parameters, **options)
    if named_parameters is not None:
        named = named_parameters = list(named_parameters)
    else:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        named = [(f"parameter{place}", one) for place, one in enumerate(parameters)]
    of_set = {"process_set": options["process_set"]} if "process_set" in options else {}
    compressor = getattr(hvdc, CODEC)(named, threshold=1, **of_set)
    _made += 1
    return _stock(optimizer, named_parameters, **{**options, "compression": compressor})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the number of optimizers with a compressor."""
    terminalreporter.write_line(f"{CODEC}: {_made} optimizers with a compressor")


if CODEC != "stock":
    hvd.DistributedOptimizer = _compressed
