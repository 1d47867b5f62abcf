"""The kernels that the CUDA tests run."""

from __future__ import annotations

import pytest

from tests.cuda.executors import Checked, configure, emulated, missing_gpu, on_gpu


@pytest.fixture(params=("emulated", "on_gpu"))
def kernels(request: pytest.FixtureRequest) -> Checked:
    """The CUDA kernels on the host, and on a GPU where there is one."""
    if request.param == "emulated":
        configure(processors=1, order=0)
        return emulated()
    reason = missing_gpu()
    if reason:
        pytest.skip(reason)
    return on_gpu()
