"""A plan as checkpoints hold it: by the tensors' names, in what JSON can say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_compress.exchange.routing import DENSE
from hvd_compress.planner.choices import config_of, route_of
from hvd_compress.planner.planner import Planner


def state_of(planner: Planner) -> dict[str, Any]:
    """:meth:`Planner.state`, for a later job."""
    state = planner.state()
    pairs = zip(planner.tensors, state["plan"], strict=True)
    return {**state, "plan": {tensor.name: config_of(route) for tensor, route in pairs}}


def restore(planner: Planner, state: Mapping[str, Any]) -> bool:
    """Goes on with a plan of :func:`state_of`; see :meth:`Planner.restore`."""
    routes = {name: route_of(config) for name, config in state["plan"].items()}
    plan = [routes.get(tensor.name, DENSE) for tensor in planner.tensors]
    return planner.restore({**state, "plan": plan})
