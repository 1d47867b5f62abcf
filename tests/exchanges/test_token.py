"""Roll calls and tokens tell the operation and who takes part, in every case that can occur."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hvd_compress.ranks import token
from hvd_compress.ranks.errors import ExchangeError


def _tokens(size: int) -> np.ndarray:
    return np.array([token.make(rank) for rank in range(size)], np.float32)


@pytest.mark.parametrize("size", (1, 2, 3, 16, 1000))
def test_average_and_sum(size: int) -> None:
    total = _tokens(size).sum(axis=0)
    assert token.everybody(total, size)
    assert token.reduction_scale(total / np.float32(size), total, size, "t") == 1 / size
    assert token.reduction_scale(total, total, size, "t") == (1.0 if size > 1 else 1 / size)
    assert token.reduced_for_everybody(total * np.float32(0.37), size)


@pytest.mark.parametrize("factor", (2.0, 3.0, 7.7, 1e-3, 1e4))
def test_predivide_factors_are_averages_up_to_rounding(factor: float) -> None:
    for size in (2, 3, 7, 64):
        before = np.float32(1 / factor)
        total = (_tokens(size) * before).sum(axis=0, dtype=np.float32)
        reduced = total * np.float32(factor / size)
        participants = _tokens(size).sum(axis=0)
        assert token.reduction_scale(reduced, participants, size, "t") == 1 / size


@pytest.mark.parametrize("size", range(2, 9))
def test_no_subset_of_the_ranks_passes_for_all_of_them(size: int) -> None:
    tokens = _tokens(size)
    for count in range(1, size):
        for subset in itertools.combinations(range(size), count):
            present = tokens[list(subset)].sum(axis=0)
            assert not token.everybody(present, size)
            assert size > 6 or not token.reduced_for_everybody(present / size, size)
            assert token.reduction_scale(present, present, size, "t") == 1.0
            assert token.reduction_scale(present / size, present, size, "t") == 1 / size


@pytest.mark.parametrize("size", range(2, 33))
def test_other_operations_are_refused(size: int) -> None:
    tokens = _tokens(size)
    participants = tokens.sum(axis=0)
    products = [math.prod(column) for column in tokens.astype(float).T.tolist()]
    for reduced in (tokens.min(axis=0), tokens.max(axis=0), products):
        with pytest.raises(ExchangeError, match="layer: expected op=Average or op=Sum"):
            token.reduction_scale(list(reduced), participants, size, "layer")


def test_another_process_set_is_refused() -> None:
    participants = _tokens(4).sum(axis=0)
    for others in itertools.combinations(range(4), 2):
        among = _tokens(4)[list(others)].sum(axis=0)
        for reduced in (among, among / 2):
            with pytest.raises(ExchangeError, match="process_set must be the optimizer's"):
                token.reduction_scale(reduced, participants, 4, "t")
