"""The memory that a step of PyTorch's frontends still holds when its results are written."""

from __future__ import annotations

import gc
import time
from typing import Any
from unittest import mock

import torch

from hvd_compress.codecs import Int8
from hvd_compress.engine.batch import Batch
from hvd_compress.engine.uncompressed import Uncompressed
from hvd_compress.process_group import shutdown
from tests.contract.cases import FULL, USUAL, gradients
from tests.contract.frontend import Frontend

# The last bucket, whose exchange is not over yet, is small.
_SHAPES = {"last": (30,), "a": (300, 400), "b": (5, 4, 40, 50), "c": (40000,), "plain": (9000,)}


def no_message_outlives_its_results(frontend: Frontend, exchange: str) -> None:
    """Messages of all ranks may be larger than all gradients, and so may copies in another order."""
    row = (Int8(), FULL) if exchange == "allgather" else USUAL[exchange]
    job = frontend.make(exchange, *row, _SHAPES, **_WHERE.get(frontend.name, {}), threshold=9500)
    arrays = [gradients(frontend.rank, step, _SHAPES) for step in range(3)]
    for step in range(2):
        job.step(arrays[step])
    gc.collect()
    before: dict[int, int] = {}
    found: list[int] = []
    run = job._run

    def run_after_a_look(*given: Any) -> None:
        before.update(_storages())  # What the test gives is not what the step holds.
        run(*given)

    def settle(content: Batch | Uncompressed, dropped: bool | torch.Tensor) -> None:
        if not found:
            # What Gloo's threads have released is freed with the next collective.
            deadline = time.monotonic() + 10
            while (size := _held(before)) >= 2000 and time.monotonic() < deadline:
                time.sleep(0.01)
            found.append(size)
        original[type(content)](content, dropped)

    original: dict[type, Any] = {Batch: Batch.settle, Uncompressed: Uncompressed.settle}
    with (
        mock.patch.object(Batch, "settle", settle),
        mock.patch.object(Uncompressed, "settle", settle),
        mock.patch.object(job, "_run", run_after_a_look),
    ):
        job.step(arrays[2])
    assert found[0] < 2000, found


_WHERE: dict[str, dict[str, Any]] = {
    "ddp": {"bucket_cap_mb": 0.1, "gradient_as_bucket_view": True, "channels_last": True}
}


def _held(known: dict[int, int]) -> int:
    shutdown._let_go()
    return sum(_storages(known).values())


def _storages(known: dict[int, int] | None = None) -> dict[int, int]:
    """The bytes of all storages of tensors but those of parameters' gradients, by address."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    with_gradients = [one for one in tensors if one.is_leaf and one.grad is not None]
    without = {one.grad.untyped_storage().data_ptr() for one in with_gradients}
    return {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in tensors
        if one.untyped_storage().data_ptr() not in without | (known or {}).keys()
    }
