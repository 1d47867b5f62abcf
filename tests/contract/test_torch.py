"""The contract, of ``hvd_compress.torch``."""

from __future__ import annotations

from tests.contract.horovod_torch import HorovodTorch
from tests.contract.rows import contract_of

globals().update(contract_of(HorovodTorch(), __name__))
