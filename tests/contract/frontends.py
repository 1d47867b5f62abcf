"""The rows of the contract by name, each of which imports its framework and no other."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from tests.contract.frontend import Frontend

FRONTENDS = {
    "torch": "tests.contract.horovod_torch:HorovodTorch",
    "tensorflow": "tests.contract.horovod_tensorflow:HorovodTensorFlow",
    "ddp": "tests.contract.ddp:DDP",
    "distributed": "tests.contract.distributed:Distributed",
}
"""Modules and classes."""


def load(name: str, frontends: Mapping[str, str] = FRONTENDS) -> Frontend:
    """A row."""
    module, _, kind = frontends[name].partition(":")
    row: Frontend = getattr(importlib.import_module(module), kind)()
    return row
