"""Compiles the operations against the installed TensorFlow, once, and caches them.

TensorFlow's C++ interface has no stable ABI, so the package cannot contain the library. Run
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
_DIGEST = f"{LIBRARY}.sha256"


class BuildError(RuntimeError):
    """The operations could not be compiled."""


def library() -> Path:
    """The path of the operations' library for this TensorFlow, compiled if the cache has none.

    Loading a library runs its code, so the cache has to belong to this user or root, and nobody else may
    write to it. A library that differs from what was compiled, for example after a power failure, is
    compiled again.

    Raises:
        BuildError: there is no compiler, it failed, or the cache cannot be used.
    """
    cache = _cache()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = cache / _key()
        ready = folder / LIBRARY
        if _is_complete(cache, folder):
            return ready
        # The lock goes with the process, so that none is ever left behind.
        with (cache / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(cache, folder):
                _build(folder)
        return ready
    except OSError as error:
        raise BuildError(
            f"hvd_compress.tensorflow: expected a folder to keep compiled operations in, got {cache}: "
            f"{error}: set HVD_COMPRESS_CACHE to a folder that you can write, and no one else"
        ) from error


def _is_complete(cache: Path, folder: Path) -> bool:
    """Whether a folder of the cache has a library that is exactly what was compiled."""
    made, digest = folder / LIBRARY, folder / _DIGEST
    for path in (cache, folder, made):
        if path.exists():
            _check_owner(path)
    try:
        return digest.read_text() == _digest(made.read_bytes())
    except FileNotFoundError:
        return False


def _check_owner(path: Path) -> None:
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise BuildError(
            f"hvd_compress.tensorflow: expected {path} to be yours alone, since its code is run, got "
            f"owner {found.st_uid} and mode {found.st_mode & 0o777:o}: remove it, or set "
            f"HVD_COMPRESS_CACHE to a folder that you can write, and no one else"
        )


def _digest(data: bytes) -> str:
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}"


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
        result.mkdir(mode=0o700)
        command = [
            *compiler.split(),
            *("-shared", "-fPIC", "-O2"),
            # Warnings of TensorFlow's own headers, among which an error would not be seen.
            *("-Wno-deprecated-declarations", "-Wno-interference-size"),
            *tf.sysconfig.get_compile_flags(),
            *(f"-I{_PACKAGE / folder}" for folder in ("csrc", "csrc/include")),
            *map(str, sorted(_SOURCES.glob("*.cc"))),
            # By its soname alone: it is loaded before, wherever the package lies.
            *(f"-L{_PACKAGE / 'lib'}", "-lhvdc_cpu"),
            *tf.sysconfig.get_link_flags(),
            *("-ldl", "-o", str(result / LIBRARY)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BuildError(
                f"hvd_compress.tensorflow: expected a C++ compiler in CXX, got {compiler!r}: {error}: "
                f"unset CXX to use g++, or set it to a compiler"
            ) from error
        if done.returncode:
            raise BuildError(
                f"hvd_compress.tensorflow: {' '.join(command)}\nended with status {done.returncode}:\n"
                f"{done.stderr[-4000:]}"
            )
        built = result / LIBRARY
        built.chmod(0o700)
        (result / _DIGEST).write_text(_digest(built.read_bytes()))
        for path in (built, result / _DIGEST, result):
            _to_disk(path)
        # In one step, so that a folder under its final name is always complete.
        shutil.rmtree(folder, ignore_errors=True)
        result.rename(folder)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    try:
        return (Path(named) if named else Path.home() / ".cache" / "hvd_compress") / "tensorflow"
    except (KeyError, RuntimeError) as error:  # This user has no home.
        raise BuildError(
            f"hvd_compress.tensorflow: expected a home folder to keep compiled operations in, got none "
            f"({error}): set HVD_COMPRESS_CACHE to a folder that you can write, and no one else"
        ) from error


if __name__ == "__main__":
    try:
        print(library())
    except BuildError as error:
        sys.exit(str(error))
