"""The row of ``hvd_compress.tensorflow``, under a stock ``DistributedGradientTape``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.shards import transpose_back
from hvd_compress.ranks.counters import Counters
from hvd_compress.tensorflow.slots import GraphSlot
from tests.contract.frontend import OF_HOROVOD, Arrays, Form, Frontend, Job, Kept
from tests.tensorflow.probes import process_set

_FOLDER = tempfile.TemporaryDirectory()
"""The folder of this process, not of a job: other ranks read checkpoints after a job has ended."""


def taped(
    shapes: Any, dtype: str, compression: Any, **options: Any
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
    """A step whose gradients are its arguments: the gradient of ``sum(p * t)`` is ``t``, exactly."""
    variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in shapes.values()]

    def step(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            parts = [tf.reduce_sum(v * t) for v, t in zip(variables, gradients, strict=True)]
            loss = tf.add_n(parts)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
        return tape.gradient(loss, variables)

    return step


class TensorFlowJob(Job):
    """A step of known gradients.

    Args:
        names: the names of the gradients.
        dtype: the gradients' dtype.
        compressor: the compressor of the step.
        run: a function from gradients to results.
    """

    def __init__(
        self,
        names: Sequence[str],
        dtype: str,
        compressor: hvdc.Compressor,
        run: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        self.compressor, self._names, self._dtype, self._run = compressor, names, dtype, run

    def step(self, gradients: Arrays, used: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        assert used is None
        results = self._run([tf.cast(gradients[name], self._dtype) for name in self._names])
        assert all(one.dtype == self._dtype for one in results)
        return {
            n: tf.cast(r, tf.float32).numpy() for n, r in zip(self._names, results, strict=True)
        }

    def kept(self) -> tuple[Kept, Kept]:
        slots = {self._names[slot.index]: slot for slot in self.compressor.slots}
        whole = {name: self._ordered(slot) for name, slot in slots.items()}
        owned = {name: slot.owned.numpy().astype(np.float32) for name, slot in slots.items()}
        return whole, owned

    def _ordered(self, slot: GraphSlot) -> np.ndarray:
        """The residual in the order of the gradient."""
        residual, shared = slot.residual.numpy().astype(np.float32), self.compressor.shared(slot)
        return transpose_back(residual, shared.transposed if shared and residual.size else None)

    @property
    def counters(self) -> Counters:
        return self.compressor.counters

    def save(self) -> Any:
        path = Path(tempfile.mkdtemp(dir=_FOLDER.name)) / "checkpoint"
        return tf.train.Checkpoint(compressor=self.compressor).write(str(path))

    def load(self, saved: Any) -> None:
        tf.train.Checkpoint(compressor=self.compressor).read(saved)

    def take_over(self, everybodys: Sequence[Any]) -> None:
        self.compressor.load_resized(everybodys)

    @contextmanager
    def joining(self) -> Iterator[None]:
        yield
        hvdc.join()


class HorovodTensorFlow(Frontend):
    """Makes and runs the contract's jobs of ``hvd_compress.tensorflow``."""

    name = "tensorflow"
    launcher = "tensorflow"
    environment = OF_HOROVOD
    errors = tf.errors.OpError
    single = False  # Horovod's tape leaves it alone, elastic or not.
    exact = False
    flag_bytes = 0
    alike = False
    varies = False
    lacks = frozenset({"hierarchical", "integer_sum", "low_rank"})
    cannot = {  # noqa: RUF012
        "owner_steps_from_a_cold_start": "an owner's work is one operation of C++, without a step",
        "other_defaults": "operations have the dtype of their input",
        "parameters_that_are_not_used": "a graph has the same gradients in every step",
        "gradients_in_another_order_on_each_rank": "tracing puts them in order",
        "payloads_of_any_length": "messages of a graph have lengths that tracing fixes",
        "a_change_of_codec_loses_no_mass": "a graph holds its codec: there is no set_codec",
        "a_change_of_codec_on_some_ranks": "a graph holds its codec: there is no set_codec",
        "a_return_without_a_reset": "a graph does not look at residuals; the page on TensorFlow says so",
        "a_change_of_codec_that_the_script_drops": "a graph holds its codec: there is no set_codec",
        "an_owner_step_that_the_script_drops": "an owner's work is one operation of C++, without a step",
    }

    rank = property(lambda self: hvd.rank())
    size = property(lambda self: hvd.size())
    local = property(lambda self: hvd.local_size())

    @property
    def forms(self) -> Sequence[Form]:
        return (
            Form({"graph": False}),
            Form({"autograph": True}),
            Form({"op": hvd.Sum}, sums=True),
            Form({"gradient_predivide_factor": 2.0}),
            Form({"groups": 2}),
        )

    def make(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Any,
        dtype: str = "float32",
        **options: Any,
    ) -> Job:
        graph = options.pop("graph", True)
        # AutoGraph first rewrites Horovod's functions, which takes each process seconds.
        autograph = options.pop("autograph", False)
        assert options.pop("inner", None) is None
        route = Route(codec, feedback)
        known = {"op", "groups", "gradient_predivide_factor"} & options.keys()
        for_tape = {name: options.pop(name) for name in known}
        if "process_set" in options:
            for_tape["process_set"] = options["process_set"]
        options = {"exchange": exchange, "threshold": 0, **options}
        compressor = hvdc.Compressor(route, **options)
        step = taped(shapes, dtype, compressor, **for_tape)
        run = tf.function(step, autograph=autograph) if graph else step
        return TensorFlowJob(list(shapes), dtype, compressor, run)

    def rounded(self, array: np.ndarray, dtype: str) -> np.ndarray:
        return tf.cast(tf.cast(array, dtype), tf.float32).numpy()

    def called(self, shapes: Any) -> dict[str, str]:
        return {name: f"gradient.{number}" for number, name in enumerate(shapes)}

    def group_of(self, *ranks: int) -> dict[str, Any]:
        return {"process_set": process_set(*ranks)}

    def gather(self, value: Any) -> list[Any]:
        return hvd.allgather_object(value, name="gathered by the contract")

    def barrier(self) -> None:
        hvd.allreduce(tf.zeros(1), name="barrier of the contract")
