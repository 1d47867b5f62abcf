"""Two shots: dropped steps, checkpoints, and another number of ranks."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import OneBit
from hvd_compress.exchanges.shards import shared, transpose, transpose_back
from hvd_compress.tensorflow.slots import GraphSlot
from hvd_compress.tensorflow.state import StateOwner
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    exchange_with,
    targets,
)


@on_ranks(2, launcher="tensorflow")
def test_a_checkpoint_of_another_exchange() -> None:
    first = hvdc.ECQ(threshold=THRESHOLD, exchange="two_shot")
    exchange_with(first, graph=True)(targets(hvd.rank(), 0))
    other = hvdc.ECQ(threshold=THRESHOLD)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(compressor=first).write(os.path.join(folder, "state"))
        with pytest.raises(ValueError, match=r"exchange allgather, got two_shot.*load_resized"):
            tf.train.Checkpoint(compressor=other).read(path)


@on_ranks(2, launcher="tensorflow")
def test_another_number_of_ranks_loses_no_mass() -> None:
    """Two ranks take over the unsent gradients of three ranks and owners, by two exchanges."""
    for group in (1024, "column"):
        _on_two_ranks(group)


def _on_two_ranks(group: int | str) -> None:
    folder = tempfile.mkdtemp()
    count = 2800
    codec: Any = OneBit(group)  # type: ignore[arg-type]
    cut = shared(codec, SHAPES[0])
    order = {"row": cut.row, "transposed": cut.transposed}
    generator = np.random.default_rng(1)
    residuals = generator.standard_normal((3, count)).astype(np.float32)
    averages = generator.standard_normal(count).astype(np.float32)
    paths = [os.path.join(folder, f"state-{rank}") for rank in range(3)]
    for rank, path in enumerate(paths):
        old = _compressor(codec, f"old.{group}.{rank}", "two_shot")
        old.owner = StateOwner(
            rank, 3, 0, lambda: {"orders": [order]}, print, exchange="two_shot", owners=3
        )
        route = old._router.choose("g", (count,), "float32")
        slot = GraphSlot(0, tf.float32, tf.TensorShape(SHAPES[0]), route)
        slot.residual.assign(transpose(residuals[rank], cut.transposed))
        ordered = transpose(averages, cut.transposed)
        slot.owned.assign(ordered[slice(*cut.shards(3).of(rank))])
        slot.exchanges.assign(7)
        old.slots.append(slot)
        tf.train.Checkpoint(model=tf.Variable(1.0), mine=old).write(path)
        old.owner = StateOwner(
            rank, 3, 0, lambda: {"orders": [order]}, print, exchange="?", owners=2
        )
        tf.train.Checkpoint(mine=old).write(f"{path}-shared-by-two")
    old.owner = StateOwner(0, 3, 0, lambda: {"orders": []}, print, exchange="allgather", owners=0)
    tf.train.Checkpoint(mine=old).write(f"{paths[0]}-gathered")
    with pytest.raises(ValueError, match="checkpoints of one exchange"):
        hvdc.OneBit(name="mixed").load_resized([f"{paths[0]}-gathered", *paths[1:]], "mine")
    with pytest.raises(ValueError, match=r"that all ranks share out .*got owners \[2, 2, 2\]"):
        hvdc.OneBit(name="of two").load_resized([f"{p}-shared-by-two" for p in paths], "mine")
    new = _compressor(codec, f"of two.{group}", "two_shot")
    with pytest.raises(ValueError, match="of size 2, got 3"):
        tf.train.Checkpoint(mine=new).read(paths[hvd.rank()])
    unsent = residuals.mean(axis=0) + averages
    for name in ("two_shot", "allgather"):
        compressor = _compressor(codec, f"new.{group}.{name}", name)
        with pytest.raises(
            ValueError, match=r"one checkpoint of each rank, got those of ranks \[0, 2\]"
        ):
            compressor.load_resized([paths[0], paths[2]], "mine")
        with pytest.raises(ValueError, match="expected a compressor called 'compressor'"):
            compressor.load_resized(paths)
        compressor.load_resized(paths[::-1], "mine")
        variable = tf.Variable(tf.zeros(SHAPES[0]))

        @tf.function
        def exchange(
            gradient: tf.Tensor,
            variable: tf.Variable = variable,
            compressor: hvdc.Compressor = compressor,
        ) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * gradient)
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            return tape.gradient(loss, [variable])[0]

        sent = exchange(tf.zeros(SHAPES[0])).numpy().reshape(-1)
        slot = compressor.slots[0]
        assert int(slot.exchanges) == 8
        left = hvd.allreduce(slot.residual.numpy(), name=f"left.{group}.{name}").numpy()
        if name == "two_shot":
            # Owners' parts, in the order of the first one's: the tensor's number is 0.
            left += hvd.allgather(slot.owned.numpy(), name=f"left.{group}.by_owners").numpy()
            left = transpose_back(left, cut.transposed)
        np.testing.assert_allclose(sent + left, unsent, atol=1e-5)


def _compressor(codec: OneBit, name: str, exchange: str) -> hvdc.Compressor:
    return hvdc.OneBit(group=codec.group, threshold=0, name=name, exchange=exchange)
