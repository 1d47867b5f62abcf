"""The contract, of ``hvd_compress.tensorflow``."""

from __future__ import annotations

from tests.contract.horovod_tensorflow import HorovodTensorFlow
from tests.contract.rows import contract_of

globals().update(contract_of(HorovodTensorFlow(), __name__))
