"""The CUDA library compiles, without a warning, wherever there is an nvcc."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_compress.kernels.cuda_library import ABI_VERSION, SIGNATURES
from tests.builds import build


@pytest.fixture(scope="module")
def library() -> Path:
    """Compiled for the oldest architecture of the list, and for those to come; a release has them all.

    The sources ask for no architecture, so that others only take longer.
    """
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc of CUDA 12 or 13")
    options = ["-DHVDC_CUDA=ON", "-DHVDC_WERROR=ON", "-DHVDC_CUDA_ARCHITECTURES=75"]
    return build("nvcc", "hvdc_cuda", *options) / "libhvdc_cuda.so"


def test_it_needs_no_cuda_library_to_be_loaded(library: Path) -> None:
    """Neither the driver nor a runtime: a machine without a GPU can import what holds it."""
    opened = ctypes.CDLL(str(library))
    assert opened.hvdc_cuda_abi_version() == ABI_VERSION
    for name in SIGNATURES:
        assert hasattr(opened, name)


def test_nothing_but_the_interface_is_visible(library: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert {
        name for name in names if not re.match(r"_?_?(fini|init|edata|end|bss_start)", name)
    } == set(SIGNATURES)


def test_a_call_without_a_gpu_is_an_error_in_cudas_words(library: Path) -> None:
    """Not a crash. Where there is a GPU, this asks for one that is not there."""
    opened = ctypes.CDLL(str(library))
    opened.hvdc_cuda_message.restype = ctypes.c_char_p
    flags = ctypes.create_string_buffer(64)
    queue = (ctypes.c_int64 * 2)(10_000, 0)
    assert opened.hvdc_cuda_restore(flags, ctypes.c_int64(0), flags, queue) == 16
    assert opened.hvdc_cuda_message() != b"no error"
