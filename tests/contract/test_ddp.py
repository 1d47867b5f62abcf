"""The contract, of ``hvd_compress.ddp``."""

from __future__ import annotations

from tests.contract.ddp import DDP
from tests.contract.rows import contract_of

globals().update(contract_of(DDP(), __name__))
