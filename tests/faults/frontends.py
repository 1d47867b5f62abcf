"""The frontends to whose ranks something happens, each of which imports its framework and no other."""

from __future__ import annotations

from tests.contract import frontends
from tests.contract.frontend import Frontend

FRONTENDS = {
    **frontends.FRONTENDS,
    "keras": "tests.faults.of_keras:Keras",
    "fsdp": "tests.faults.of_fsdp:FSDP",
    "diloco": "tests.faults.of_diloco:OfDiLoCo",
}
"""Modules and classes: the rows of the contract, and frontends that are built on these."""


def load(name: str) -> Frontend:
    """A row."""
    return frontends.load(name, FRONTENDS)
