"""Values that ranks exchange under Horovod and PyTorch beside their gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.torch.values import tell
from tests import pickles, told
from tests.ranks import on_ranks


@on_ranks(2)
def test_values_come_back_and_a_length_beyond_all_bounds_is_an_error_on_every_rank() -> None:
    told.check(tell, hvd.rank())


@on_ranks(2)
def test_a_pickle_of_another_rank_is_not_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        if hvd.rank() == 0:
            with pytest.raises(hvdc.ExchangeError, match="expected a value as JSON from rank 1"):
                tell(1, "pickle")
        else:
            bad = pickles.leaving(trace)
            hvd.allgather(torch.tensor([len(bad)]), name="pickle.length")
            hvd.allgather(torch.tensor(list(bad), dtype=torch.uint8), name="pickle.value")
        hvd.barrier()
        assert not trace.exists()
