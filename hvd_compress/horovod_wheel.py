"""Builds Horovod against the installed frameworks, and prints the wheel's path.

Horovod's newest release predates today's compilers and frameworks, and is published as source
only. This module downloads the source, makes the edits listed below, most of them to its build
files, and keeps the wheel in a cache. Run it with the Python that has the frameworks, where pip,
setuptools below 80, cmake and a C++ compiler are installed::

    python -m pip install "$(python -m hvd_compress.horovod_wheel)"

By default, the wheel is for CPUs, whether or not the machine has a CUDA toolkit and torch can use CUDA,
as PyPI's torch for Linux can.

With --gpu, the wheel is for CUDA. "nccl" communicates by NCCL; "staged" copies through the host, for
two ranks on one GPU, which NCCL refuses. Both need a torch for CUDA and a CUDA toolkit (CUDA_HOME, or
nvcc on the PATH). --sdist takes the source from a file, for a machine without a network.

With --mpi, the wheel runs under MPI as well as under Gloo, and needs the MPI that it was built with.

Progress goes to stderr, and the build's log into the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
HEARTBEAT_S = 30


@dataclasses.dataclass(frozen=True)
class Edit:
    """A replacement of `old`, which must occur exactly once in `file`, by `new`."""

    file: str
    old: str
    new: str
    framework: str | None = None  # None: for all frameworks


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The settings of a build for CUDA: one of GPU_MODES, and compute capabilities in Horovod's format."""

    mode: str
    capabilities: str


LOCKED = "  std::lock_guard<std::recursive_mutex> lock(horovod_global.process_set_table.mutex);\n"
CHECKED = """\
  if (!horovod_global.process_set_table.Contains(process_set_id)) {
    return Status::InvalidArgument("""
UNKNOWN_PROCESS_SET = (
    '"Allreduce: Process',
    '"Allgather: Process',
    '"Broadcast: Process',
    '\n        "Reducescatter: Process',
    '"Alltoall: Process',
)

EDITS = (
    # torch's headers use C++20, and all sources of a library are compiled to one standard.
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
    # setup.py would download packages that the environment has already, and fail without a network.
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
    # With today's torch, a thread that releases a tensor needs Python's lock (the GIL). When a job ends,
    # Horovod's background thread releases tensors while it holds the lock on its process sets, and hangs
    # if a thread that holds the GIL hands over a tensor at that moment. So the GIL is released first.
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "PYBIND11_MODULE(mpi_lib_v2, m) {\n",
        """\
struct Unlocked {
  py::module_ module;
  template <typename Function> void def(const char* name, Function function) {
    if (std::string(name) == "horovod_torch_wait_and_clear") {
      module.def(name, function);  // It lets the lock go itself.
    } else {
      module.def(name, function, py::call_guard<py::gil_scoped_release>());
    }
  }
};

PYBIND11_MODULE(mpi_lib_v2, module) {
  Unlocked m{module};
""",
        "torch",
    ),
    # Under Gloo, the vector of ranks stays empty, so Horovod's check for stalled ranks finds none missing:
    # it neither warns nor stops the job, whatever HOROVOD_STALL_SHUTDOWN_TIME_SECONDS says.
    Edit(
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_);",
        "global_ranks_.resize(size_);",
    ),
    # A job that has lost a rank asks all ranks to agree on the removal of its process sets, which throws an
    # exception. Nothing caught it, and it ended the processes before Python could act.
    Edit(
        "horovod/common/process_set.cc",
        """\
    while (true) {
      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (""",
        """\
    while (true) {
      try {
        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      } catch (const std::exception& error) {
        LOG(DEBUG) << "Removing a process set without the others: " << error.what();
        id_to_process_set_[id].Finalize(status);
        DeregisterProcessSet(id);
        id_to_be_removed_ = SUCCESSFUL_REMOVAL;
      }
      if (""",
    ),
    # During its shutdown, Horovod could queue a tensor after it had emptied the queue for the last time.
    # The tensor's operation never ended, and the script waited forever. Queues are emptied under this lock.
    *(
        Edit("horovod/common/operations.cc", f"{before}{after}", f"{before}{LOCKED}{after}")
        for before, after in [
            *(("", CHECKED + text) for text in UNKNOWN_PROCESS_SET),
            (
                "                   const int device, StatusCallback callback,\n"
                "                   int32_t process_set_id) {\n",
                "  if (horovod_global.shut_down) {\n",
            ),
            ("Status EnqueueBarrier(StatusCallback callback, int32_t process_set_id) {\n", ""),
        ]
    ),
    # TensorFlow's wheel lacks a header that this file includes, which only HOROVOD_ENABLE_XLA_OPS=1 uses.
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        "tensorflow",
    ),
)

CPU_EDITS = (
    # With a torch for CUDA and a CUDA toolkit, Horovod would build for CUDA.
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "print(False)",
        "torch",
    ),
    # Nothing is compiled for CUDA, and an nvcc that refuses the C++ compiler must not stop the build.
    Edit(
        "CMakeLists.txt",
        """\
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit)
""",
        """\
set(CMAKE_CUDA_COMPILER OFF)
if(FALSE)
""",
    ),
)

CUDA_EDITS = (
    # On a machine with only a driver, the name without a version may be missing.
    Edit(
        "horovod/torch/cuda_util.cc",
        'dlopen("libcuda.so", RTLD_LAZY)',
        'dlopen("libcuda.so.1", RTLD_LAZY)',
    ),
)
GPU_MODES = ("nccl", "staged")

# Third-party code in the sdist uses these headers without including them; since gcc 13, other headers no
# longer include them.
CXXFLAGS = "-include cstdint -include string -include stdexcept"

# The distributions that provide each module: TensorFlow also has a CPU-only one.
DISTRIBUTIONS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}


def say(text: str) -> None:
    """Prints a line of progress to stderr; stdout has the path of the wheel alone."""
    print(f"horovod: {text}", file=sys.stderr, flush=True)


def installed_version(framework: str) -> str:
    """Returns the version of an installed framework; exits if it is not installed."""
    for name in DISTRIBUTIONS[framework]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    raise SystemExit(f"horovod: {framework} must be installed in {sys.prefix} first")


def compiler() -> list[str]:
    """Returns the command of the C++ compiler, ``CXX`` or c++; exits if it is not there."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(command[0]) is None:
        raise SystemExit(f"horovod: no C++ compiler: {command[0]} is not on the PATH")
    return command


def cmake() -> str:
    """Returns the path of cmake; exits if it is not there."""
    path = shutil.which("cmake")
    if path is None:
        raise SystemExit("horovod: cmake is not on the PATH")
    return path


def require_setuptools() -> None:
    """Exits unless setuptools is installed: Horovod's setup.py needs it, and pip is to download nothing."""
    if importlib.util.find_spec("setuptools") is None:
        raise SystemExit(
            f"horovod: setuptools must be installed in {sys.prefix} first: pip install 'setuptools<80'"
        )


def first_line(*command: str) -> str:
    """Returns the first line that a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[0]


def cuda_home() -> Path:
    """The folder of the CUDA toolkit, even if nvcc on the PATH is only a script that calls the real one."""
    named = os.environ.get("CUDA_HOME")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit(
            "horovod: --gpu needs a CUDA toolkit: set CUDA_HOME, or put nvcc on the PATH"
        )
    listed = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    top = re.search(r"^#\$ _?TOP=(.*)$", listed.stderr, re.MULTILINE)
    return (Path(top[1]) if top else Path(nvcc).resolve().parent.parent).resolve()


def nvidia_library(pattern: str) -> Path:
    """The path of a library in one of NVIDIA's packages, which are installed with PyTorch for CUDA."""
    for folder in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        found = sorted(Path(folder, "nvidia").glob(pattern))
        if found:
            return found[0]
    raise SystemExit(f"horovod: --gpu: expected nvidia/{pattern} among the packages, found none")


def link_libraries(folder: Path) -> dict[str, str]:
    """Links the libraries under names without versions, which the packages lack.

    Returns:
        The environment variables that point the build to the links.
    """
    folder.mkdir()
    nccl = nvidia_library("nccl/lib/libnccl.so.*")
    (folder / "libnccl.so").symlink_to(nccl)
    (folder / "libcudart.so").symlink_to(nvidia_library("cu*/lib/libcudart.so.*"))
    home = nccl.parent.parent
    return {
        "CMAKE_LIBRARY_PATH": str(folder),
        "HOROVOD_NCCL_HOME": str(home),
        "HOROVOD_NCCL_INCLUDE": str(home / "include"),
        "HOROVOD_NCCL_LIB": str(folder),
    }


def gpu_variables(gpu: Gpu) -> dict[str, str]:
    """The settings for --gpu; without GPU_OPERATIONS, Horovod's torch bindings copy through the host."""
    home = str(cuda_home())
    variables = {
        "CUDA_HOME": home,
        "HOROVOD_CUDA_HOME": home,
        "HOROVOD_BUILD_CUDA_CC_LIST": gpu.capabilities,
    }
    if gpu.mode == "nccl":
        operations = {"GPU": "CUDA", "GPU_OPERATIONS": "NCCL", "NCCL_LINK": "SHARED"}
        variables |= {f"HOROVOD_{name}": value for name, value in operations.items()}
    return variables


def build_variables(frameworks: list[str], gpu: Gpu | None, mpi: bool = False) -> dict[str, str]:
    """The environment variables that decide what the wheel holds."""
    chosen = {
        f"HOROVOD_{'WITH' if name in frameworks else 'WITHOUT'}_{variable}": "1"
        for name, variable in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW"))
    }
    return {
        **chosen,
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        f"HOROVOD_{'WITH' if mpi else 'WITHOUT'}_MPI": "1",
        "CXXFLAGS": CXXFLAGS,
        # Otherwise, markers for NVIDIA's profiler are compiled in where a toolkit's headers are found.
        **(gpu_variables(gpu) if gpu else {"HOROVOD_WITHOUT_NVTX": "1"}),
    }


def build_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a build, without variables that would change the wheel but not the cache's key."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_")
        # A surrounding make passes on its options and a job server that this process cannot use.
        # Horovod's build passes VERBOSE=1, which ninja takes for a target.
        and name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CFLAGS", "LDFLAGS", "CMAKE_GENERATOR"}
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


def edits_for(frameworks: list[str], gpu: Gpu | None) -> list[Edit]:
    """Returns the edits of Horovod's source that these frameworks and this GPU need."""
    edits = EDITS + (CUDA_EDITS if gpu else CPU_EDITS)
    return [edit for edit in edits if edit.framework is None or edit.framework in frameworks]


def ingredients(
    frameworks: list[str], variables: Mapping[str, str], gpu: Gpu | None
) -> dict[str, str]:
    """Everything that a wheel depends on, as readable text, whose digest is the cache's key."""
    recipe = [dataclasses.astuple(edit) for edit in edits_for(frameworks, gpu)]
    return {
        "horovod": VERSION,
        **{name: installed_version(name) for name in frameworks},
        "python": sysconfig.get_config_var("SOABI"),
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()),
        "compiler": first_line(*compiler(), "--version"),
        "edits": hashlib.sha256(repr((recipe, sorted(variables.items()))).encode()).hexdigest(),
        **(gpu_ingredients(gpu.mode) if gpu else {}),
        **({"mpi": mpi_version()} if "HOROVOD_WITH_MPI" in variables else {}),
    }


def gpu_ingredients(mode: str) -> dict[str, str]:
    """The further ingredients of a wheel for CUDA."""
    nvcc = str(cuda_home() / "bin" / "nvcc")
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    return {
        "gpu": mode,
        "nvcc": version.strip().split("\n")[-1],
        "nccl": str(nvidia_library("nccl/lib/libnccl.so.*")) if mode == "nccl" else "",
    }


def mpi_version() -> str:
    """Returns the version of the installed MPI; exits without one."""
    if shutil.which("mpicxx") is None or shutil.which("mpirun") is None:
        raise SystemExit("horovod: --mpi needs mpicxx and mpirun on the PATH, such as Open MPI's")
    return first_line("mpirun", "--version")


def apply_edits(source: Path, edits: Iterable[Edit]) -> None:
    """Replaces the text of each edit, which must stand in its file exactly once."""
    for edit in edits:
        path = source / edit.file
        text = path.read_text()
        found = text.count(edit.old)
        if found != 1:
            raise SystemExit(f"horovod: expected {edit.old!r} once in {edit.file}, got {found}")
        path.write_text(text.replace(edit.old, edit.new))


def run_logged(command: list[str], what: str, log: Path, environment: Mapping[str, str]) -> None:
    """Runs a command with its output in `log`, and reports its progress every HEARTBEAT_S seconds."""
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
    """The last percentage that make printed to the log, as text; empty if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200_000))
        percentages = re.findall(rb"\[ *(\d+)%\]", file.read())
    return f", {percentages[-1].decode()}%" if percentages else ""


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks Horovod's sdist into a folder, after a check of its SHA-256; returns the source's folder."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise SystemExit(f"horovod: expected an sdist of SHA-256 {SDIST_SHA256}, got {digest}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder)  # Safe: the digest has been checked.
    return folder / f"horovod-{VERSION}"


def download(folder: Path, log: Path) -> Path:
    """Downloads Horovod's source unless `folder` has it, and returns its path there."""
    ready = folder / f"horovod-{VERSION}.tar.gz"
    if ready.exists():
        return ready
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
        run_logged(
            [*pip, "download", *options, "--dest", scratch, f"horovod=={VERSION}"],
            "downloading the source",
            log,
            build_environment({}),
        )
        Path(scratch, ready.name).rename(ready)
    return ready


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on a file; the operating system releases it if the process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the same wheel; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_wheel(folder: Path) -> Path | None:
    """Returns the wheel in a folder, or None."""
    return next(folder.glob("horovod-*.whl"), None)


def wheel(
    frameworks: list[str], cache: Path, gpu: Gpu | None, mpi: bool, sdist: Path | None
) -> Path:
    """The path of a wheel for these frameworks, built if the cache has none."""
    variables = build_variables(frameworks, gpu, mpi)
    parts = ingredients(frameworks, variables, gpu)
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"{VERSION}-{'-'.join(frameworks)}-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{folder.name}.lock"):
        ready = find_wheel(folder)
        if ready is None:
            ready = build(frameworks, variables, parts, folder, gpu, sdist)
        else:
            say(f"using {ready}")
    return ready


def build(
    frameworks: list[str],
    variables: Mapping[str, str],
    parts: Mapping[str, str],
    folder: Path,
    gpu: Gpu | None,
    sdist: Path | None,
) -> Path:
    """Builds the wheel from edited source, with its parts in a file beside it; returns its path."""
    require_setuptools()
    start = time.monotonic()
    say(f"building {VERSION} for {' and '.join(frameworks)}; this takes several minutes")
    log = folder.with_name(f"{folder.name}.log")
    log.write_text("")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder.parent) as scratch:
        source = unpack(sdist or download(folder.parent, log), Path(scratch))
        apply_edits(source, edits_for(frameworks, gpu))
        if gpu is not None:
            variables = {**variables, **link_libraries(Path(scratch, "libraries"))}
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
        # Renamed at the end, so that a folder under its final name is always complete.
        shutil.rmtree(folder, ignore_errors=True)
        result.rename(folder)
    ready = find_wheel(folder)
    assert ready is not None
    say(f"built {ready} in {time.monotonic() - start:.0f} s")
    return ready


def default_cache() -> Path:
    """Returns the cache of this package, ``HVD_COMPRESS_CACHE`` or a folder of the user."""
    named = os.environ.get("HVD_COMPRESS_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "hvd_compress"


def main() -> None:
    """Builds the wheel that the command line asks for, and prints its path."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_compress.horovod_wheel",
        description="Build Horovod against the installed frameworks and print the wheel's path.",
    )
    parser.add_argument(
        "--frameworks",
        default="torch",
        metavar="NAME[,NAME]",
        help="torch, tensorflow, or both with a comma (default: torch)",
    )
    parser.add_argument("--gpu", choices=GPU_MODES, help="build for CUDA (needs a torch for CUDA)")
    parser.add_argument(
        "--capabilities",
        default="90",
        metavar="CC[,CC]",
        help="the compute capabilities to build for with --gpu (default: 90)",
    )
    parser.add_argument(
        "--mpi", action="store_true", help="build for MPI, too; needs mpicxx and mpirun"
    )
    parser.add_argument("--sdist", type=Path, help="a file with Horovod's source (default: PyPI's)")
    args = parser.parse_args()
    gpu = Gpu(args.gpu, args.capabilities) if args.gpu else None
    chosen = sorted(set(args.frameworks.split(",")))
    unknown = set(chosen) - set(DISTRIBUTIONS)
    if unknown:
        parser.error(f"expected {' or '.join(DISTRIBUTIONS)}, got {', '.join(sorted(unknown))}")
    # A build that is stopped still removes its temporary files.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(wheel(chosen, (default_cache() / "horovod").absolute(), gpu, args.mpi, args.sdist))


if __name__ == "__main__":
    main()
