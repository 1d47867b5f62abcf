"""The contract, of ``hvd_compress.distributed``."""

from __future__ import annotations

from tests.contract.distributed import Distributed
from tests.contract.rows import contract_of

globals().update(contract_of(Distributed(), __name__))
