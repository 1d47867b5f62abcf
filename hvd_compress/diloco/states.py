"""Checks of DiLoCo's states before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_compress.codecs import checks
from hvd_compress.diloco.common import CommonParameters
from hvd_compress.diloco.fragments import Fragment


def check_state(
    who: str,
    state: Any,
    common: CommonParameters,
    fragments: Sequence[Fragment],
    configuration: Mapping[str, Any],
) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless a state is one of this model, with these settings."""
    if not isinstance(state, dict) or "configuration" not in state:
        kind = "None" if state is None else f"an object of type {type(state).__name__} without"
        raise TypeError(f"DiLoCo.{who}: expected what state_dict() returned, got {kind}")
    checks.check_number(f"DiLoCo.{who}", "steps", state.get("steps"), 0, sys.maxsize, integer=True)
    if "compressor" not in state:
        raise ValueError(f"DiLoCo.{who}: expected a compressor's state, got none")
    _check_counts(who, state.get("history"), len(fragments))
    _check_due(who, state.get("due"), common, fragments)
    _check_to_send(who, state.get("to_send"), common)
    check_fits(who, state, common, configuration)


def check_fits(
    who: str, state: dict[str, Any], common: CommonParameters, configuration: Mapping[str, Any]
) -> None:
    """Raises ``ValueError`` if a state has another model or other settings."""
    got = state["configuration"]
    for name, value in configuration.items():
        found = got.get(name) if isinstance(got, dict) else got
        if isinstance(found, torch.Tensor) or found != value:
            raise ValueError(f"DiLoCo.{who}: expected {name} {value}, got {found}")
    common.check(who, state)


def _check_counts(who: str, history: Any, fragments: int) -> None:
    every = history.values() if isinstance(history, dict) else [history]
    if not all(
        isinstance(counts, list)
        and len(counts) == fragments
        and all(len(one) == 2 and all(type(n) is int and n >= 0 for n in one) for one in counts)
        for counts in every
    ):
        raise ValueError(
            f"DiLoCo.{who}: history: expected counts of {fragments} fragments, got {history}"
        )


def _check_due(who: str, due: Any, common: CommonParameters, fragments: Sequence[Fragment]) -> None:
    fragment: Any
    for fragment, one in due.items() if isinstance(due, dict) else [(None, due)]:
        known = type(fragment) is int and 0 <= fragment < len(fragments)
        names = fragments[fragment].names if known else []
        shapes = [common.values[name].shape for name in names]
        fits = known and isinstance(one, (tuple, list)) and len(one) == 4
        if (
            not fits
            or type(one[0]) is not int
            or [getattr(t, "shape", None) for t in one[1]] != shapes
            or [type(flag) for flag in (one[2], *one[3])] != [bool] * (1 + len(names))
        ):
            raise ValueError(
                f"DiLoCo.{who}: due: expected averages of fragments by number, got others for fragment "
                f"{fragment}"
            )


def _check_to_send(who: str, names: Any, common: CommonParameters) -> None:
    if not isinstance(names, dict) or not all(
        name in common.copies and type(loaded) is bool for name, loaded in names.items()
    ):
        raise ValueError(
            f"DiLoCo.{who}: to_send: expected names of parameters, each with a bool, got {names}"
        )
