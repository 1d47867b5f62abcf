"""The device that the tests of PyTorch's frontends are to run on."""

from __future__ import annotations

import os

TYPE = os.environ.get("HVDC_TEST_DEVICE", "cpu")
"""``HVDC_TEST_DEVICE=cuda``: models and gradients are on a GPU, which ranks share where there are fewer
GPUs than ranks; then their messages go through the host. The reference always computes on the host."""
