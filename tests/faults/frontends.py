"""The frontends of the tests of faults; each imports only its own framework."""

from __future__ import annotations

from tests.contract import frontends
from tests.contract.frontend import Frontend

FRONTENDS = {
    **frontends.FRONTENDS,
    "keras": "tests.faults.of_keras:Keras",
    "fsdp": "tests.faults.of_fsdp:FSDP",
    "diloco": "tests.faults.of_diloco:OfDiLoCo",
}
"""The modules and classes of the contract's frontends, and of frontends that build on these."""


def load(name: str) -> Frontend:
    """Loads a frontend by its name."""
    return frontends.load(name, FRONTENDS)
