"""Compiles the operations against the installed TensorFlow, once, into a cache.

TensorFlow's C++ interface has no stable ABI, so that the library cannot come with the package. Run
``python -m hvd_compress.tensorflow.build`` to compile ahead of the first import.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_SOURCES = Path(__file__).parent / "ops"
LIBRARY = "libhvdc_tensorflow.so"


class BuildError(RuntimeError):
    """The operations could not be compiled."""


def library() -> Path:
    """The path of the operations' library for this TensorFlow, compiled if the cache has none.

    Raises:
        BuildError: no compiler, or it failed.
    """
    folder = _cache() / _key()
    ready = folder / LIBRARY
    if ready.exists():
        return ready
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The lock goes with the process, so that none is ever left behind.
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            _build(folder)
    return ready


def _build(folder: Path) -> None:
    import tensorflow as tf

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError(
            "hvd_compress.tensorflow: expected a C++ compiler to build its operations with, found none: "
            "install g++ or set CXX, or copy the cache folder from a machine that has one"
        )
    print(
        f"hvd_compress: compiling operations for TensorFlow {tf.__version__}, half a minute, once",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        result = Path(scratch, "result")
        result.mkdir()
        command = [
            *compiler.split(),
            *("-shared", "-fPIC", "-O2"),
            # Of TensorFlow's own headers; an error would not be seen among them.
            *("-Wno-deprecated-declarations", "-Wno-interference-size"),
            *tf.sysconfig.get_compile_flags(),
            *(f"-I{_PACKAGE / folder}" for folder in ("csrc", "csrc/include")),
            *map(str, sorted(_SOURCES.glob("*.cc"))),
            # By its soname alone: it is loaded before, wherever the package lies.
            *(f"-L{_PACKAGE / 'lib'}", "-lhvdc_cpu"),
            *tf.sysconfig.get_link_flags(),
            *("-ldl", "-o", str(result / LIBRARY)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(
                f"hvd_compress.tensorflow: {' '.join(command)}\nended with status {done.returncode}:\n"
                f"{done.stderr[-4000:]}"
            )
        # In one step, so that a folder under its final name is always complete.
        shutil.rmtree(folder, ignore_errors=True)
        result.rename(folder)


def _key() -> str:
    import tensorflow as tf

    digest = hashlib.sha256()
    flags = (flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith("-I"))
    digest.update(" ".join(flags).encode())
    headers = [*_SOURCES.iterdir(), *(_PACKAGE / "csrc").rglob("*.h")]
    for path in sorted(headers):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{tf.__version__}-{digest.hexdigest()[:16]}"


def _cache() -> Path:
    named = os.environ.get("HVD_COMPRESS_CACHE")
    return (Path(named) if named else Path.home() / ".cache" / "hvd_compress") / "tensorflow"


if __name__ == "__main__":
    try:
        print(library())
    except BuildError as error:
        sys.exit(str(error))
