#!/usr/bin/env python3
"""Build Horovod against the installed frameworks, once, and print the wheel's path.

Horovod's newest release predates today's compilers and frameworks, and is published as source
only. This script downloads that source, makes the edits listed below, all of them to its build
files, and keeps the wheel in a cache. Run it with the Python that has the frameworks:

    .venv/bin/python -m pip install "$(.venv/bin/python scripts/horovod_wheel.py)"

Progress goes to stderr, the full build log into the cache. Only the standard library is used.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
HEARTBEAT_S = 30


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replaces `old`, which must occur exactly once in `file`, by `new`."""

    file: str
    old: str
    new: str
    framework: str | None = None  # None: whatever the frameworks


EDITS = (
    # torch's headers use C++20; what shares a library with them is compiled alike.
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "torch",
    ),
    # cmake 4 refuses projects that ask for compatibility with less than 3.5.
    Edit(
        "third_party/gloo/CMakeLists.txt",
        "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)",
        "cmake_minimum_required(VERSION 3.5 FATAL_ERROR)",
    ),
    # setup.py would download what the environment has already, and fail without a network.
    Edit(
        "setup.py",
        "setup_requires=require_list if is_build_action() else [],",
        "setup_requires=[],",
    ),
    # One language standard for both frameworks' libraries, so that they agree on Gloo's symbols.
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 17)",
        "set(CMAKE_CXX_STANDARD 20)",
        "tensorflow",
    ),
    # TensorFlow's wheel lacks a header that this file includes. Only HOROVOD_ENABLE_XLA_OPS=1
    # would use what is in it.
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        "tensorflow",
    ),
)

# Third-party code in the sdist uses these headers without including them; from gcc 13 on they no
# longer come along with others.
CXXFLAGS = "-include cstdint -include string -include stdexcept"

# The name of the distribution may differ from the module's: TensorFlow has a CPU-only one.
DISTRIBUTIONS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}


def say(text: str) -> None:
    print(f"horovod: {text}", file=sys.stderr, flush=True)


def installed_version(framework: str) -> str:
    for name in DISTRIBUTIONS[framework]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    raise SystemExit(f"horovod: {framework} must be installed in {sys.prefix} first")


def refuse_cuda_torch() -> None:
    """Stops where Horovod's build would, much later, ask for a CUDA toolkit."""
    spec = importlib.metadata.distribution("torch").locate_file("torch/version.py")
    cuda = runpy.run_path(str(spec)).get("cuda")
    if cuda:
        raise SystemExit(
            f"horovod: this script builds for CPUs, but the installed torch is a build for CUDA "
            f"{cuda}. Point pip at an index with torch's CPU builds (PIP_EXTRA_INDEX_URL) and "
            f"start again with an empty virtual environment."
        )


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(command[0]) is None:
        raise SystemExit(f"horovod: no C++ compiler: {command[0]} is not on the PATH")
    return command


def cmake() -> str:
    path = shutil.which("cmake")
    if path is None:
        raise SystemExit("horovod: cmake is not on the PATH")
    return path


def first_line(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[0]


def build_variables(frameworks: list[str]) -> dict[str, str]:
    """The settings that decide what the wheel holds."""
    chosen = {
        f"HOROVOD_{'WITH' if name in frameworks else 'WITHOUT'}_{variable}": "1"
        for name, variable in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW"))
    }
    return {
        **chosen,
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "CXXFLAGS": CXXFLAGS,
    }


def build_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without anything that would change the build behind the key."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_")
        # A surrounding make hands its options down, and a job server that is closed to us.
        and name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CFLAGS", "LDFLAGS"}
    }
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    # A file that includes torch's headers takes more than a gigabyte to compile.
    jobs = max(1, min(len(os.sched_getaffinity(0)), int(gigabytes / 2)))
    return {
        **environment,
        **variables,
        "HOROVOD_CMAKE": cmake(),
        "MAKEFLAGS": f"-j{jobs}",
        "PYTHONUNBUFFERED": "1",
    }


def edits_for(frameworks: list[str]) -> list[Edit]:
    return [edit for edit in EDITS if edit.framework is None or edit.framework in frameworks]


def ingredients(frameworks: list[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Everything that went into a wheel, as readable text: its digest is the cache's key."""
    recipe = [dataclasses.astuple(edit) for edit in edits_for(frameworks)]
    return {
        "horovod": VERSION,
        **{name: installed_version(name) for name in frameworks},
        "python": sysconfig.get_config_var("SOABI"),
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()),
        "compiler": first_line(*compiler(), "--version"),
        "edits": hashlib.sha256(repr((recipe, sorted(variables.items()))).encode()).hexdigest(),
    }


def apply_edits(source: Path, frameworks: list[str]) -> None:
    for edit in edits_for(frameworks):
        path = source / edit.file
        text = path.read_text()
        found = text.count(edit.old)
        if found != 1:
            raise SystemExit(f"horovod: expected {edit.old!r} once in {edit.file}, got {found}")
        path.write_text(text.replace(edit.old, edit.new))


def run_logged(command: list[str], what: str, log: Path, environment: Mapping[str, str]) -> None:
    """Runs with all output in `log`, and a sign of life every now and then."""
    start = time.monotonic()
    say(f"{what} (log: {log})")
    with log.open("a") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=dict(environment)
        )
        try:
            while True:
                try:
                    status = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{what}, {time.monotonic() - start:.0f} s{progress(log)}")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"error[: ]", line, re.IGNORECASE)][:10]
        print("\n".join([*errors, "...", *lines[-30:]]), file=sys.stderr)
        raise SystemExit(f"horovod: {what} failed with status {status}; the log is {log}")


def progress(log: Path) -> str:
    """The last percentage that make printed, if any."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200_000))
        percentages = re.findall(rb"\[ *(\d+)%\]", file.read())
    return f", {percentages[-1].decode()}%" if percentages else ""


def download(folder: Path, log: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--dest", str(folder)]
    run_logged(
        [*pip, "download", *options, f"horovod=={VERSION}"],
        "downloading the source",
        log,
        build_environment({}),
    )
    (archive,) = folder.glob("horovod-*.tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise SystemExit(f"horovod: expected an sdist of SHA-256 {SDIST_SHA256}, got {digest}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder)  # the digest above says what is in it
    return folder / f"horovod-{VERSION}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One builder at a time; the lock goes with the process, so none is ever left behind."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the same wheel; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_wheel(folder: Path) -> Path | None:
    return next(folder.glob("horovod-*.whl"), None)


def wheel(frameworks: list[str], cache: Path) -> Path:
    """The path of a wheel for these frameworks, built if the cache has none."""
    if "torch" in frameworks:
        installed_version("torch")
        refuse_cuda_torch()
    variables = build_variables(frameworks)
    parts = ingredients(frameworks, variables)
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"{VERSION}-{'-'.join(frameworks)}-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{folder.name}.lock"):
        ready = find_wheel(folder)
        if ready is None:
            ready = build(frameworks, variables, parts, folder)
        else:
            say(f"using {ready}")
    return ready


def build(
    frameworks: list[str], variables: Mapping[str, str], parts: Mapping[str, str], folder: Path
) -> Path:
    start = time.monotonic()
    say(f"building {VERSION} for {' and '.join(frameworks)}; this takes several minutes")
    log = folder.with_name(f"{folder.name}.log")
    log.write_text("")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder.parent) as scratch:
        source = download(Path(scratch), log)
        apply_edits(source, frameworks)
        result = Path(scratch, "result")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
        options = ["--verbose", "--no-build-isolation", "--no-deps", "--wheel-dir", str(result)]
        run_logged(
            [*pip, "wheel", *options, str(source)],
            "compiling",
            log,
            build_environment(variables),
        )
        if find_wheel(result) is None:
            raise SystemExit(f"horovod: the build left no wheel; the log is {log}")
        (result / "ingredients.json").write_text(json.dumps(parts, indent=2) + "\n")
        # In one step, so that a folder under its final name is always complete.
        shutil.rmtree(folder, ignore_errors=True)
        result.rename(folder)
    ready = find_wheel(folder)
    assert ready is not None
    say(f"built {ready} in {time.monotonic() - start:.0f} s")
    return ready


def default_cache() -> Path:
    named = os.environ.get("HVD_COMPRESS_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "hvd_compress"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build Horovod against the installed frameworks and print the wheel's path."
    )
    parser.add_argument(
        "--frameworks",
        default="torch",
        metavar="NAME[,NAME]",
        help="torch, tensorflow, or both with a comma (default: torch)",
    )
    chosen = sorted(set(parser.parse_args().frameworks.split(",")))
    unknown = set(chosen) - set(DISTRIBUTIONS)
    if unknown:
        parser.error(f"expected {' or '.join(DISTRIBUTIONS)}, got {', '.join(sorted(unknown))}")
    print(wheel(chosen, (default_cache() / "horovod").absolute()))


if __name__ == "__main__":
    main()
