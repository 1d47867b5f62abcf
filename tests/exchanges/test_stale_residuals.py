"""Residuals that are far larger than gradients are told of once."""

from __future__ import annotations

import threading
import warnings
from unittest import mock

import torch

from hvd_compress.engine.residuals import Stale


def test_buckets_that_are_compared_at_the_same_time_give_one_warning() -> None:
    stale, both = Stale(), threading.Barrier(2)
    norm = torch.linalg.vector_norm

    def together(*args: torch.Tensor, **kwargs: torch.dtype) -> torch.Tensor:
        both.wait(60)
        return norm(*args, **kwargs)

    def compare(name: str) -> None:
        stale.compare([name], [torch.full((100,), 1e-6)], [torch.ones(100)])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mock.patch.object(torch.linalg, "vector_norm", together):
            threads = [threading.Thread(target=compare, args=(name,)) for name in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        compare("c")
    assert len(caught) == 1, [str(one.message) for one in caught]
