"""Whose gradients a compressor gets: those of one model."""

from __future__ import annotations

import weakref
from typing import Any

from hvd_compress.ranks.errors import ExchangeError


class Model:
    """The variables of the functions whose gradients a compressor was given.

    Gradients are known by their position in a function. So those of another model of the same shapes, in a
    function of its own, would get the first model's residuals. Functions of one model, or traces of one
    function, have variables in common.
    """

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Any]] = []

    def check(self, graph: Any) -> None:
        """Called when a function's first gradient is traced.

        Args:
            graph: the function's.

        Raises:
            ExchangeError: its trainable variables are those of another model.
        """
        variables = _trainable(graph)
        seen = {id(one) for one in (ref() for ref in self._seen) if one is not None}
        new = [one for one in variables if id(one) not in seen]
        if seen and new and len(new) == len(variables):
            raise ExchangeError(
                f"expected the variables of the model whose gradients came before, got others, such as "
                f"{new[0].name}: one compressor cannot serve two models; make one for each model and "
                f"optimizer"
            )
        self._seen += [weakref.ref(one) for one in new]


def _trainable(graph: Any) -> list[Any]:
    """Trainable variables that a function has accessed so far, those of functions around it included."""
    found: dict[int, Any] = {}
    while hasattr(graph, "outer_graph"):
        # ``graph.variables`` is set at the end of tracing.
        accessed = getattr(graph, "_watched_variables", ())
        found.update((id(one), one) for one in accessed if one.trainable)
        graph = graph.outer_graph
    return list(found.values())
