"""Values that ranks exchange under Horovod and TensorFlow beside their gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.tensorflow.collectives import called, tell
from tests import pickles, told
from tests.ranks import on_ranks


@on_ranks(2, launcher="tensorflow")
def test_values_come_back_and_a_length_beyond_all_bounds_is_an_error_on_every_rank() -> None:
    told.check(tell, hvd.rank())


@on_ranks(2, launcher="tensorflow")
def test_a_pickle_of_another_rank_is_not_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        if hvd.rank() == 0:
            with pytest.raises(hvdc.ExchangeError, match="expected a value as JSON from rank 1"):
                tell(1, "pickle")
        else:
            bad = pickles.leaving(trace)
            for what, sent in (
                ("length", np.array([len(bad)])),
                ("value", np.frombuffer(bad, "u1")),
            ):
                options = called(f"pickle.{what}", hvd.global_process_set)
                hvd.allgather(tf.constant(sent), **options)
        hvd.allreduce(tf.zeros(1), name="pickles are read")
        assert not trace.exists()
