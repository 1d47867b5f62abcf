"""Finds the variable to which a gradient belongs.

Horovod passes only a tensor to a compressor. But its function that reduces the gradients of one call,
``allreduce_grads(grads, vars)``, is on the stack, and has the variables. A tape that is made while a
``tf.function`` is traced calls that function there, with that trace's variables. A tape or optimizer that
is made eagerly wraps it in a ``tf.function``, which TensorFlow traces once for all variables of the same
shapes: such a trace is *shared*, and only each call tells which variables it serves.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.slots import GraphSlot

_REDUCES = "allreduce_grads"


@dataclass(frozen=True, eq=False)
class Source:
    """The variable to which a gradient belongs.

    Attributes:
        variable: TensorFlow's variable.
        name: the variable's name, for checkpoints.
        place: its position among the variables of the call.
        label: the gradient's name in patterns and messages; empty for that of its position.
        call: all variables of the call; empty where the trace is for these variables alone.
    """

    variable: Any
    name: str
    place: int = 0
    label: str = ""
    call: Sequence[Any] = ()

    @classmethod
    def of(cls, variable: Any, **rest: Any) -> Source:
        """Makes a source from a variable of TensorFlow or Keras.

        Raises:
            ExchangeError: the object is not a variable.
        """
        inner = tensorflow_variable(variable)
        if inner is None:
            raise ExchangeError(
                f"expected variables as sources of compressed gradients, whose residuals they tell apart, "
                f"got {variable!r}: take gradients of other tensors with a tape without compression"
            )
        return cls(inner, name_of(variable), **rest)


def tensorflow_variable(variable: Any) -> Any:
    """TensorFlow's variable, which may be inside one of Keras; None for any other object."""
    inner = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else None


def name_of(variable: Any) -> str:
    """The path of a variable of Keras, or the name of one of TensorFlow."""
    return getattr(variable, "path", variable.name)


@dataclass(frozen=True, eq=False)
class Call:
    """A call of Horovod's function that reduces gradients.

    Attributes:
        gradients: the list of gradients.
        variables: their variables, in the same order.
        shared: whether the trace serves several lists of variables.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    shared: bool

    def source(self, gradient: tf.Tensor, count: int) -> Source:
        """The source of one of the gradients.

        Args:
            gradient: the tensor that Horovod passed to ``compress``.
            count: the number of times that Horovod passed the same tensor before in this call: several
                variables may have one gradient.

        Raises:
            ExchangeError: the source is not a variable.
        """
        places = [i for i, one in enumerate(self.gradients) if one is gradient]
        place = places[count % len(places)]
        call = self.variables if self.shared else ()
        return Source.of(self.variables[place], place=place, call=call)


def call_of(gradient: tf.Tensor) -> Call:
    """The call of Horovod's function that is reducing a gradient.

    Raises:
        ExchangeError: no tape or optimizer called Horovod.
    """
    for frame in _frames():
        if frame.f_code.co_name.endswith(_REDUCES) and frame.f_locals.get("vars") is not None:
            gradients, variables = frame.f_locals["grads"], frame.f_locals["vars"]
            if any(one is gradient for one in gradients):
                return Call(gradients, variables, _called_with(frame) is not None)
    raise ExchangeError(
        f"expected a gradient from hvd.DistributedGradientTape or hvd.DistributedOptimizer, got "
        f"one of {gradient.shape} from another function: compress() cannot tell which variable it is of"
    )


class Variables:
    """The slots of variables."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], tuple[weakref.ref[Any], GraphSlot]] = {}

    def find(self, variable: Any, turn: int) -> GraphSlot | None:
        """The slot of a variable's gradient; None where there is none yet.

        Args:
            variable: TensorFlow's variable.
            turn: the number of gradients of the variable before this one in the same call of Horovod.
        """
        known, slot = self._slots.get((id(variable), turn), (None, None))
        return slot if known is not None and known() is variable else None

    def add(self, variable: Any, turn: int, slot: GraphSlot) -> None:
        """Registers a slot; warns if compressors are made for one step each."""
        self._slots[id(variable), turn] = weakref.ref(variable), slot
        if turn == 0 and slot.route.feedback.enabled:
            _note_compressor(variable, slot)


_latest: dict[int, tuple[weakref.ref[Any], weakref.ref[GraphSlot], int]] = {}
"""By a variable's id: the variable, its newest slot, and how many slots before served one step each."""


def _note_compressor(variable: Any, slot: GraphSlot) -> None:
    key, thrown = id(variable), 0
    known, newest, before = _latest.get(key, (None, None, 0))
    if known is not None and newest is not None and known() is variable:
        earlier = newest()
        thrown = before + 1 if earlier is None or int(earlier.exchanges) == 1 else 0
    there = weakref.ref(variable, lambda _: _latest.pop(key, None))
    _latest[key] = there, weakref.ref(slot), thrown
    # Fewer may belong to optimizers that share the variable, in their first step.
    if thrown == 3:
        warnings.warn(
            f"expected one compressor for all steps, got a fourth one for {variable.name} after three that "
            f"exchanged one gradient each: what they have not sent is lost; make a compressor once, before "
            f"the loop",
            stacklevel=2,
        )


class SharedTrace:
    """The slots of a trace that serves several lists of variables, looked up in each call.

    Args:
        graph: the graph of the trace.
        find: maps a variable, its turn and the slot that was traced to the slot that replaces it.
        found: called with the slots of a call.
    """

    def __init__(
        self,
        graph: Any,
        find: Callable[[Source, int, GraphSlot], GraphSlot],
        found: Callable[[list[GraphSlot]], None],
    ) -> None:
        self._graph, self._find, self._found = graph, find, found
        self._traced: list[tuple[int, int, GraphSlot]] = []
        self._now: list[GraphSlot] = []

    def handles(self, source: Source, turn: int, slot: GraphSlot) -> list[tf.Tensor]:
        """The tensors of :attr:`GraphSlot.handles`, looked up in each call."""
        number = len(self._traced)
        self._traced.append((source.place, turn, slot))
        return [
            self._graph.capture_call_time_value(
                partial(self._handle, number, part), tf.TensorSpec([], handle.dtype)
            )
            for part, handle in enumerate(slot.handles)
        ]

    def _handle(self, number: int, part: int) -> tf.Tensor:
        if (number, part) == (0, 0):  # TensorFlow asks in the order of tracing.
            variables = _called_with(sys._getframe(0))
            if variables is None:
                raise ExchangeError(
                    "expected a tape that is made in the tf.function in which it is used, got one that was "
                    "made outside of it: its gradients' variables are not known there"
                )
            self._now = [
                self._find(Source.of(variables[place], place=place), turn, slot)
                for place, turn, slot in self._traced
            ]
            self._found(self._now)
        return self._now[number].handles[part]


def _called_with(frame: Any) -> Sequence[Any] | None:
    """The variables with which Horovod's function was called, if it is a ``tf.function``."""
    for one in _frames(frame):
        if one.f_code.co_name == "__call__":
            function = getattr(one.f_locals.get("self"), "python_function", None)
            if getattr(function, "__name__", "") == _REDUCES:
                return one.f_locals["args"][1]
    return None


def _frames(frame: Any = None) -> Iterator[Any]:
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        yield frame
        frame = frame.f_back
