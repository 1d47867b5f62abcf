"""These tests run where Keras 3, TensorFlow, and a Horovod that was built with it, are installed."""

from __future__ import annotations

from tests.frameworks import without_keras

collect_ignore_glob = ["test_*.py"] if without_keras() else []


def pytest_report_header() -> str | None:
    """Says why nothing of this folder is collected."""
    reason = without_keras()
    return f"tests/keras: not collected, {reason}" if reason else None
