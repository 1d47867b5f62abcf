"""These tests run where TensorFlow, and a Horovod that was built with it, are installed."""

from __future__ import annotations

import importlib.util


def _missing() -> str | None:
    if importlib.util.find_spec("tensorflow") is None:
        return "TensorFlow is not installed; `make setup` installs it"
    horovod = importlib.util.find_spec("horovod")
    folder = horovod.submodule_search_locations if horovod else None
    from pathlib import Path

    if not folder or not any(Path(folder[0], "tensorflow").glob("mpi_lib*.so")):
        return "this Horovod was built without TensorFlow"
    return None


collect_ignore_glob = ["test_*.py"] if _missing() else []


def pytest_report_header() -> str | None:
    """Says why nothing of this folder is collected."""
    reason = _missing()
    return f"tests/tensorflow: not collected, {reason}" if reason else None
