"""Pickles that leave a trace when they are loaded."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch


class _Trace:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def leaving(trace: Path) -> bytes:
    """Returns a pickle that creates the file ``trace`` when it is loaded, which is tried here first."""
    made = pickle.dumps(_Trace(trace))
    pickle.loads(made)
    trace.unlink()
    return made


def saved_leaving(trace: Path) -> bytes:
    """Returns such a pickle in the format of ``torch.save``, which is also tried first."""
    made = saved(_Trace(trace))
    torch.load(io.BytesIO(made), weights_only=False)
    trace.unlink()
    return made


def saved(state: Any) -> bytes:
    """The bytes that ``torch.save`` writes for a state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
