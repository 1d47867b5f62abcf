"""Jobs of Keras 3 with an optimizer of ``hvd_compress.keras``, whose updates are the averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_compress.keras as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback
from tests.contract.frontend import Job
from tests.contract.horovod_tensorflow import HorovodTensorFlow, TensorFlowJob


class Keras(HorovodTensorFlow):
    """The frontend ``hvd_compress.keras``."""

    name = "keras"

    def make(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Any,
        dtype: str = "float32",
        **options: Any,
    ) -> Job:
        compressor = hvdc.Compressor(
            Route(codec, feedback), exchange=exchange, **{"threshold": 0, **options}
        )
        optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compressor)
        variables = [keras.Variable(np.zeros(shape, dtype)) for shape in shapes.values()]

        @tf.function(autograph=False)
        def update(gradients: Sequence[tf.Tensor]) -> None:
            optimizer.apply(gradients, variables)

        def run(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            for variable in variables:
                variable.assign(np.zeros(variable.shape, dtype))
            update(gradients)
            return [-variable.value for variable in variables]

        return TensorFlowJob(list(shapes), dtype, compressor, run)
