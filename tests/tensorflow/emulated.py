"""A GPU that TensorFlow takes for one, on machines without.

``emulated_gpu/`` is a device of TensorFlow's type GPU: it has memory that the host cannot touch, and does
its work later. The operations' own library runs on it as it is, with the CUDA kernels' sources compiled for
the host in place of ``libhvdc_cuda.so``. With ``HVDC_TEST_GPU=real`` in the environment, the tests take the
machine's own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import tensorflow as tf

from hvd_compress.kernels import cuda_library

_SOURCES = Path(__file__).parent / "emulated_gpu"
_REAL = os.environ.get("HVDC_TEST_GPU") == "real"
_FOLDER = Path(__file__).resolve().parents[2] / "build"
_KERNELS = _FOLDER / "emulated" / "libhvdc_cuda_emulated.so"
_LIBRARY = _FOLDER / "emulated_gpu" / "libhvdc_emulated_gpu.so"


def build() -> None:
    """Builds the emulation before the ranks start, which would build it at the same time."""
    if _REAL:
        return
    from tests.cuda.executors import emulated_library

    assert emulated_library() == _KERNELS
    sources = sorted(_SOURCES.iterdir())
    if _LIBRARY.exists() and _LIBRARY.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return
    _LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(os.environ.get("CXX") or shutil.which("g++") or "c++").split(),
        *(
            "-shared",
            "-fPIC",
            "-O1",
            "-g1",
            "-Wno-deprecated-declarations",
            "-Wno-interference-size",
        ),
        *tf.sysconfig.get_compile_flags(),
        f"-I{Path(cuda_library.__file__).parents[1] / 'csrc' / 'include'}",
        *(str(source) for source in sources if source.suffix == ".cc"),
        *tf.sysconfig.get_link_flags(),
        *("-ldl", "-lpthread", "-o", str(_LIBRARY)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@cache
def plug_in() -> None:
    """Gives this process a GPU; before TensorFlow has looked for one."""
    if _REAL:
        assert tf.config.list_logical_devices("GPU"), "TensorFlow has found no GPU"
        return
    library = ctypes.CDLL(str(_LIBRARY))
    assert library.hvdc_emulated_gpu_open(str(_KERNELS).encode())
    cuda_library.LIBRARY = _LIBRARY
    assert tf.config.list_logical_devices("GPU"), "TensorFlow had been started before"
