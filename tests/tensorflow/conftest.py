"""These tests run where TensorFlow, and a Horovod that was built with it, are installed."""

from __future__ import annotations

from tests.frameworks import without_tensorflow

collect_ignore_glob = ["test_*.py"] if without_tensorflow() else []


def pytest_report_header() -> str | None:
    """Says why nothing of this folder is collected."""
    reason = without_tensorflow()
    return f"tests/tensorflow: not collected, {reason}" if reason else None
