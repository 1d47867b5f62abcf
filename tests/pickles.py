"""Pickles that leave a trace where they are read."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch


class _Trace:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def leaving(trace: Path) -> bytes:
    """A pickle that makes a file where it is read; that it does has been tried."""
    made = pickle.dumps(_Trace(trace))
    pickle.loads(made)
    trace.unlink()
    return made


def saved_leaving(trace: Path) -> bytes:
    """The same as ``torch.save`` makes it."""
    made = saved(_Trace(trace))
    torch.load(io.BytesIO(made), weights_only=False)
    trace.unlink()
    return made


def saved(state: Any) -> bytes:
    """What ``torch.save`` makes of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
