"""Checks that ranks agree on what they send: readable configurations, compared once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import deserialize

_SHOWN = 5


def serialize(configuration: dict[str, Any]) -> bytes:
    """One rank's configuration as a line of JSON, so that gathered lines can be separated."""
    return json.dumps(configuration, sort_keys=True).encode() + b"\n"


def check(gathered: bytes) -> None:
    """Compares all ranks' configurations, from their lines, one after the other in rank order.

    Raises:
        ExchangeError: settings differ, with each rank's value of each of them; or a line is not JSON.
    """
    compare(deserialize(gathered.splitlines()))


def compare(configurations: Sequence[dict[str, Any]]) -> None:
    """Raises :class:`ExchangeError`, with each rank's value of each setting that differs, in rank order."""
    ranks = [_flatten(settings) for settings in configurations]
    settings = sorted(set().union(*ranks))
    differing = [s for s in settings if len({_canonical(rank, s) for rank in ranks}) > 1]
    if not differing:
        return
    lines = [f"  {s}: {_by_value(s, ranks)}" for s in differing[:_SHOWN]]
    if len(differing) > _SHOWN:
        lines.append(f"  ... and {len(differing) - _SHOWN} more settings")
    raise ExchangeError(
        "expected the same model and the same compression on every rank, but they differ in\n"
        + "\n".join(lines)
    )


def _by_value(setting: str, ranks: list[dict[str, Any]]) -> str:
    holders: dict[str | None, list[int]] = {}
    for rank, settings in enumerate(ranks):
        holders.setdefault(_canonical(settings, setting), []).append(rank)
    shown = []
    for value, held in holders.items():
        text = "absent" if value is None else str(ranks[held[0]][setting])
        shown.append(f"{text} on rank {ranges(held)}")
    return ", ".join(shown)


def _canonical(settings: dict[str, Any], setting: str) -> str | None:
    return json.dumps(settings[setting]) if setting in settings else None


def ranges(ranks: Sequence[int]) -> str:
    """The numbers of some ranks, as text; the first ones if there are many."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return shown if len(ranks) <= _SHOWN else f"{shown} and {len(ranks) - _SHOWN} more"


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key} "))
        else:
            flat[prefix + key] = value
    return flat
