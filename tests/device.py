"""The device on which the tests of PyTorch's frontends run."""

from __future__ import annotations

import os

TYPE = os.environ.get("HVDC_TEST_DEVICE", "cpu")
"""The type of device for models and gradients: ``HVDC_TEST_DEVICE``, or ``cpu``. With ``cuda``, if there
are fewer GPUs than ranks, ranks share them and send through the host. With ``hostdev``, the tests run on
:mod:`tests.hostdev.hostdev`. The reference runs on the host."""
