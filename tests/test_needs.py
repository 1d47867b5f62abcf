"""A frontend without its framework says what to install, in an interpreter without that framework."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_compress


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages that holds NumPy and this package, and nothing else."""
    spec = importlib.util.find_spec("numpy")
    assert spec and spec.origin
    numpy = Path(spec.origin).parent
    for name in ("numpy", "numpy.libs"):
        if numpy.with_name(name).exists():
            (tmp_path / name).symlink_to(numpy.with_name(name))
    (tmp_path / "hvd_compress").symlink_to(Path(hvd_compress.__file__).parent)
    return tmp_path


def _import(module: str, site: Path) -> str:
    """Imports a module with the packages in ``site``; returns the last line of the output."""
    code = f"import sys; sys.path.append({str(site)!r}); import {module}; print('imported')"
    # With -I and -S, Python has only the standard library besides.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).strip().split("\n")[-1]


@pytest.mark.parametrize(
    ("frontend", "there", "missing"),
    (
        ("torch", (), "PyTorch: pip install torch"),
        ("torch", ("torch",), "Horovod 0.28.1"),
        ("distributed", (), "PyTorch: pip install torch"),
        ("ddp", (), "PyTorch: pip install torch"),
        ("diloco", (), "PyTorch: pip install torch"),
        ("fsdp", (), "PyTorch: pip install torch"),
        ("papers", (), "PyTorch: pip install torch"),
        ("lightning", (), "PyTorch: pip install torch"),
        ("lightning", ("torch",), "Lightning: pip install lightning"),
        ("transformers", ("torch",), "Transformers and Accelerate: pip install transformers accel"),
        ("transformers", ("torch", "transformers"), "Accelerate: pip install accelerate"),
        ("tensorflow", (), "TensorFlow: pip install tensorflow-cpu"),
        ("tensorflow", ("tensorflow",), "Horovod 0.28.1"),
        ("keras", (), "TensorFlow: pip install tensorflow-cpu"),
        ("keras", ("tensorflow",), "Keras 3: pip install keras"),
        ("keras", ("tensorflow", "keras"), "Horovod 0.28.1"),
    ),
)
def test_what_is_missing(frontend: str, there: tuple[str, ...], missing: str, site: Path) -> None:
    for name in there:
        (site / name).mkdir()  # An empty folder is enough for the module to be found.
        (site / name / "__init__.py").touch()
    line = _import(f"hvd_compress.{frontend}", site)
    assert line.startswith(f"ModuleNotFoundError: hvd_compress.{frontend} needs {missing}")
    assert line.endswith("use hvd_compress.ddp") == ((frontend, there) == ("torch", ("torch",)))


def test_a_module_of_a_frontend_says_so_too(site: Path) -> None:
    line = _import("hvd_compress.ddp.compressor", site)
    assert line.startswith("ModuleNotFoundError: hvd_compress.ddp needs PyTorch")


@pytest.mark.parametrize(
    "module",
    (
        "hvd_compress",
        "hvd_compress.codecs",
        "hvd_compress.command_line",
        "hvd_compress.horovod_wheel",
    ),
)
def test_what_numpy_is_enough_for(module: str, site: Path) -> None:
    assert _import(module, site) == "imported"


def test_a_build_of_horovod_says_that_it_needs_setuptools(site: Path) -> None:
    """A new virtual environment of Python 3.12 has none."""
    line = _import("hvd_compress.horovod_wheel as wheel; wheel.require_setuptools()", site)
    assert line.startswith("horovod: setuptools must be installed in ")
    assert line.endswith(": pip install 'setuptools<80'")
