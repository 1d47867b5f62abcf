"""TensorFlow's row runs where TensorFlow, and a Horovod that was built with it, are installed."""

from __future__ import annotations

from tests.frameworks import without_tensorflow

collect_ignore = ["test_tensorflow.py"] if without_tensorflow() else []
