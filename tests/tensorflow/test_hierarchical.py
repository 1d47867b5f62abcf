"""The hierarchical exchange: what a planner chooses, and ranks that it cannot take."""

from __future__ import annotations

from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.tensorflow import collectives
from tests.ranks import on_ranks
from tests.tensorflow.auto_probes import by, deciding, start
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    assert_same,
    exchange_with,
    kept_by,
    targets,
)

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def _start(**options: Any) -> hvdc.Compressor:
    return hvdc.OneBit(**{"threshold": THRESHOLD, "exchange": "hierarchical", **options})


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_a_planner_may_choose_it() -> None:
    fixed = hvdc.OneBit(threshold=THRESHOLD, exchange="hierarchical")
    with deciding(lambda routes: [by("onebit", "hierarchical")(routes)] * len(SHAPES)):
        compressor = start()
    planned, expected = (exchange_with(one, graph=True) for one in (compressor, fixed))
    for step in range(2):
        gradients = targets(hvd.rank(), step)
        assert_same(planned(gradients), expected(gradients))
    assert_same(kept_by(compressor), kept_by(fixed))


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_what_cannot_be_hierarchical() -> None:
    pair = hvd.add_process_set([0, 3])  # Hosts and places have sets of their own.
    with pytest.raises(ValueError, match="expected None for exchange='hierarchical', got a set of"):
        _start(process_set=pair)


@on_ranks(3, launcher="tensorflow on two hosts", environment=DYNAMIC, alone=True)
def test_hosts_of_unequal_size() -> None:
    message = (
        r"hosts: .*local rank 0 of 2 on host 0 on rank 0, .* local rank 0 of 1 on host 1 on rank 2"
    )
    with pytest.raises(hvdc.ExchangeError, match=message):
        _start()


@on_ranks(4, launcher="tensorflow on two hosts", alone=True)
def test_no_process_sets_and_a_rank_with_another_exchange() -> None:
    with pytest.raises(hvdc.ExchangeError, match="takes process sets, got: Set HOROVOD_DYNAMIC"):
        _start()
    if hvd.rank() == 3:
        _start(exchange="two_shot")
    else:
        with (
            mock.patch.object(collectives, "TIMEOUT", 2.0),
            pytest.raises(hvdc.ExchangeError, match="expected all 4 ranks to make a compressor"),
        ):
            _start()
    hvd.allreduce(tf.zeros(1), name="met")  # A rank that leaves early would take Horovod with it.
