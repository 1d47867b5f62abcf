"""Loads models whose optimizer continues to exchange gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from hvd_compress.keras.optimizer import DistributedOptimizer, loading
from hvd_compress.tensorflow import Compressor


def load_model(
    filepath: str | Path,
    compression: Any | None = None,
    *,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **options: Any,
) -> keras.Model:
    """Loads a compiled model and makes its optimizer a :func:`DistributedOptimizer`.

    This works whether or not the optimizer was distributed when the model was saved; its variables are
    those of the file. Residuals belong to a rank and are not in the file: see ``tf.train.Checkpoint``.

    Args:
        filepath, custom_objects, safe_mode: the same as in ``keras.models.load_model``.
        compression, options: the same as in :func:`DistributedOptimizer`.

    Raises:
        ValueError: the model was not compiled when it was saved.
    """
    with loading():
        model = keras.models.load_model(
            filepath, custom_objects=custom_objects, safe_mode=safe_mode
        )
        if getattr(model, "optimizer", None) is None:
            raise ValueError(
                f"expected a compiled model, got {filepath} without an optimizer: load it by "
                f"keras.models.load_model, and compile it with a DistributedOptimizer"
            )
        made = DistributedOptimizer(model.optimizer, compression, **options).compression
    if isinstance(made, Compressor):
        made.use.dismiss()  # The model may be loaded to be evaluated, and trains with this one if at all.
    return model
