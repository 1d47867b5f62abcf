"""The operations' library: no compiler, one that fails, unusable caches, and two processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hvd_compress.tensorflow import build
from tests import jobs

ROOT = Path(__file__).parent.parent.parent


def _build(cache: Path, **variables: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k != "CXX"}
    return subprocess.Popen(
        jobs.forked("tensorflow", "hvd_compress.tensorflow.build"),
        cwd=ROOT,
        env={**kept, "HVD_COMPRESS_CACHE": str(cache), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_a_compiler(tmp_path: Path) -> None:
    process = _build(tmp_path, PATH=str(tmp_path))
    printed, errors = process.communicate(timeout=jobs.TIMEOUT)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "expected a C++ compiler to build its operations with, found none: install g++" in errors
    assert not printed
    # A compiler that comes later finds nothing in its way.
    assert not list(tmp_path.rglob(build.LIBRARY))


def test_with_a_compiler_that_fails(tmp_path: Path) -> None:
    process = _build(tmp_path, CXX="false")
    _, errors = process.communicate(timeout=jobs.TIMEOUT)
    assert process.returncode == 1
    assert "ended with status 1" in errors and "-lhvdc_cpu" in errors


def test_two_processes_at_once_compile_once(tmp_path: Path) -> None:
    """The compiler is a slow one that gives the library which is there already, and counts."""
    calls = tmp_path / "calls"
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import shutil, sys, time\n"
        f"print('called', file=open({str(calls)!r}, 'a'), flush=True)\n"
        "time.sleep(5)\n"
        f"shutil.copy({str(build.library())!r}, sys.argv[sys.argv.index('-o') + 1])\n"
    )
    compiler.chmod(0o755)
    processes = [_build(tmp_path / "cache", CXX=str(compiler)) for _ in range(2)]
    printed = [process.communicate(timeout=jobs.TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    paths = {out.strip() for out, _ in printed}
    assert len(paths) == 1
    assert calls.read_text() == "called\n"
    library = Path(paths.pop())
    assert library.is_relative_to(tmp_path / "cache")
    assert library.read_bytes() == build.library().read_bytes()
    assert [p.name for p in library.parent.parent.iterdir() if not p.name.endswith(".lock")] == [
        library.parent.name
    ]


def _errors(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=jobs.TIMEOUT)
    assert process.returncode == 1 and "Traceback" not in errors
    return errors


def test_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    """A file in its place, one that others may write, and a compiler that is not there."""
    (tmp_path / "file").write_text("")
    assert "set HVD_COMPRESS_CACHE to a folder" in _errors(_build(tmp_path / "file"))
    shared = tmp_path / "shared"
    (shared / "tensorflow").mkdir(parents=True)
    (shared / "tensorflow").chmod(0o777)
    errors = _errors(_build(shared))
    assert "to be yours alone, since its code is run, got owner" in errors and "mode 777" in errors
    errors = _errors(_build(tmp_path / "new", CXX="/no/such/compiler"))
    assert "expected a C++ compiler in CXX, got '/no/such/compiler'" in errors


def test_a_library_that_is_not_as_it_was_compiled(tmp_path: Path) -> None:
    """A file that is empty, as after a loss of power, is compiled again."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import shutil, sys\n"
        f"shutil.copy({str(build.library())!r}, sys.argv[sys.argv.index('-o') + 1])\n"
    )
    compiler.chmod(0o755)
    for damage in (lambda path: path.write_bytes(b""), Path.unlink):
        printed, errors = _build(tmp_path, CXX=str(compiler)).communicate(timeout=jobs.TIMEOUT)
        library = Path(printed.strip())
        assert library.read_bytes() == build.library().read_bytes(), errors
        assert library.parent.stat().st_mode & 0o777 == 0o700
        damage(library)
    printed, _ = _build(tmp_path, CXX=str(compiler)).communicate(timeout=jobs.TIMEOUT)
    assert Path(printed.strip()).stat().st_size
