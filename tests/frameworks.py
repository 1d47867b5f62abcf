"""Checks for the frameworks that tests need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path


def without_tensorflow() -> str | None:
    """The reason why tests of TensorFlow cannot run; None if they can."""
    if importlib.util.find_spec("tensorflow") is None:
        return "TensorFlow is not installed; `make setup` installs it"
    horovod = importlib.util.find_spec("horovod")
    folder = horovod.submodule_search_locations if horovod else None
    if not folder or not any(Path(folder[0], "tensorflow").glob("mpi_lib*.so")):
        return "this Horovod was built without TensorFlow"
    return None


def without_keras() -> str | None:
    """The reason why tests of Keras 3 cannot run; None if they can."""
    if reason := without_tensorflow():
        return reason
    version = importlib.metadata.version("keras")
    return None if int(version.split(".")[0]) >= 3 else f"Keras {version} is not Keras 3"
