#!/usr/bin/env python3
"""Build, test and measure the CUDA kernels on a machine with a GPU, and write one JSON record.

    make gpu-check PYTHON=/path/to/python WHEELS=folder

Nothing is downloaded. PYTHON must have a torch for CUDA. The other packages (setuptools, pytest,
hypothesis, tqdm, scikit-learn with scipy, joblib and threadpoolctl, and a Horovod for NCCL) may come from
the wheels in WHEELS, which are installed in the checkout's build folder, not into PYTHON; wheels for
another Python are left out. A table lists first what was found. NCCL refuses two ranks on one GPU, so the
runs with two ranks use a second Horovod, built for CUDA without HOROVOD_GPU_OPERATIONS, from
WHEELS/staged. If WHEELS holds Horovod's source (horovod-0.28.1.tar.gz) instead, both are built from it by
python -m hvd_compress.horovod_wheel.

The part for TensorFlow needs a TensorFlow for CUDA in PYTHON, and a Horovod built with it, in PYTHON or
from WHEELS: the Horovod built by this script is for torch.

The record has an entry for each part, and a failed part does not stop the others. Parts that build or
measure run alone, one after the other; the rest then run at the same time. The exit status is 0 if at
least one part passed and none failed; a part that cannot run on this machine does not count as failed.

The script needs only the standard library.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "hvd_compress/gpu-check/2"
SITE, STAGED, START = (ROOT / "build" / "gpu" / name for name in ("site", "staged", "start"))
_FOUND_GPU = {
    "tensorflow": "import tensorflow as tf; assert tf.config.list_physical_devices('GPU')",
    "torch": "import torch; assert torch.cuda.is_available()",
}
TAIL = 4000
"""The number of characters of a failed part's output that are recorded."""
NEEDED = (
    *(("program", name) for name in ("nvidia-smi", "nvcc", "g++", "cmake", "make")),
    *(("program", name) for name in ("compute-sanitizer", "horovodrun")),
    *(
        ("module", name)
        for name in ("torch", "setuptools", "pytest", "hypothesis", "tqdm", "sklearn")
    ),
    ("module", "horovod.torch.mpi_ops"),
    ("gpu", "torch"),
    ("gpu", "tensorflow"),
)
"""The programs, modules and GPUs that the first table lists, by kind and name."""
_MARK = "HVDC_GPU_CHECK_PART"
"""The environment variable that marks the processes of a part, whatever session they are in."""
_LEFT_OUT = "left out: "
_SIDE_BY_SIDE = 8
"""The number of parts that run at the same time."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: the part's name in the record.
        command: the command, which runs in the checkout.
        variables: environment variables of the command.
        otherwise: environment variables for a second try after a failure; ``None``: no second try.
        timeout: the time limit in seconds.
        beside: whether other parts may run at the same time.
        site: a folder of packages that take precedence over those of all parts.
        result: a JSON file written by the command, which is copied into the record.
        needs: ``"program:NAME"``, ``"module:NAME"`` or ``"gpu:FRAMEWORK"`` (a framework that finds a GPU)
            each; if one is missing, the part is recorded as not run.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    otherwise: Mapping[str, str] | None = None
    timeout: float = 900
    beside: bool = False
    site: Path | None = None
    result: Path | None = None
    needs: tuple[str, ...] = ()


def parts(wheels: Path | None, quick: bool) -> list[Part]:
    """All parts, in the order of the record."""
    python = sys.executable
    out = ROOT / "build" / "gpu"
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")

    def spread(processes: int) -> tuple[str, ...]:
        return ("-n", str(processes)) if importlib.util.find_spec("xdist") else ()

    # The sanitizer sees a write beyond a tensor only if each tensor is an allocation of its own.
    checked = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    few = "on_gpu and (golden or many_blocks or one_batch or more_arrays or restored)"
    architecture = compute_capability()
    chosen = f" -DHVDC_CUDA_ARCHITECTURES={architecture}" if architecture else ""
    # A warning of a new compiler fails the first try and is recorded; the second ignores warnings.
    strict, lenient = (
        {"HVDC_CUDA": "on", "CMAKE_ARGS": f"-DHVDC_WERROR={errors}{chosen}"}
        for errors in ("ON", "OFF")
    )
    train = (python, "-m", "benchmarks.train", "--framework", "torch", "--model", "lenet")
    recipe = ("--compression", "none", "onebit", "int8", "ternary", "ecq", "--steps", "60")

    def sanitizer(tool: str) -> Part:
        leaks = ("--leak-check", "no") if tool == "memcheck" else ()
        options = ("--tool", tool, "--error-exitcode", "9", *leaks)
        return Part(
            f"sanitizer {tool}",
            ("compute-sanitizer", *options, *pytest, "tests/cuda", "-k", few),
            checked,
            needs=("program:compute-sanitizer", "module:pytest"),
            timeout=1800,
            beside=True,
        )

    def benchmark(name: str, *options: str) -> Part:
        result = out / f"codec{''.join(options)}.json"
        command = (python, "-m", "benchmarks.codec", "--device", "cuda", "--json", str(result))
        return Part(name, (*command, *options), result=result, needs=("module:tqdm",))

    def frontends(
        name: str,
        *tests: str,
        processes: int = 4,
        site: Path | None = None,
        horovod: bool = False,
    ) -> Part:
        needs = ("module:horovod",) if horovod else ()
        return Part(
            name,
            (*pytest, *spread(processes), *tests),
            {"HVDC_TEST_DEVICE": "cuda", "HVDC_TEST_UNITS": "files"},
            site=site,
            needs=("gpu:torch", "module:pytest", *needs),
            timeout=1800,
            beside=True,
        )

    contract = ("tests/contract/test_ddp.py", "tests/contract/test_distributed.py")
    under_horovod = ("tests/contract/test_torch.py", "-k")

    launches = out / "launches.json"
    installed, builds = installations(wheels, architecture or "90") if wheels else ([], [])
    return [
        *installed,
        Part(
            "native",
            (python, "setup.py", "--quiet", "build_ext", "--inplace"),
            strict,
            lenient,
            needs=(
                "module:torch",
                "module:setuptools",
                "program:nvcc",
                "program:g++",
                "program:cmake",
            ),
        ),
        Part(
            "parity",
            (*pytest, *spread(8), "tests/cuda", "-k", "on_gpu"),
            needs=("module:pytest",),
        ),
        benchmark("benchmark, quick", "--quick"),
        *(() if quick else (benchmark("benchmark"),)),
        Part(
            "launches",
            (python, "-m", "benchmarks.launches", "--device", "cuda", "--json", str(launches)),
            result=launches,
            needs=("gpu:torch",),
        ),
        *builds,
        *(sanitizer(tool) for tool in ("memcheck", "synccheck", "racecheck")),
        frontends(
            "a rank by NCCL", *contract, "tests/cuda/test_host_waits.py", "-k", "on_a_rank or wait"
        ),
        frontends("ranks through the host", *contract, "-k", "not on_a_rank"),
        # Some of these are tests of ranks of Horovod, which share the GPU.
        *(
            frontends(name, *(f"tests/{folder}" for folder in folders), processes=5, site=STAGED)
            for name, folders in (
                ("FSDP2", ("fsdp",)),
                ("DiLoCo and model parallelism", ("diloco", "papers")),
                ("all_reduce and optimizers", ("distributed", "optim")),
            )
        ),
        frontends("a rank of Horovod by NCCL", *under_horovod, "on_a_rank", horovod=True),
        frontends(
            "ranks of Horovod through the host",
            *under_horovod,
            "not on_a_rank",
            site=STAGED,
            horovod=True,
        ),
        Part(
            "training, one rank by NCCL",
            (*train, "--device", "cuda", *recipe, "--json", str(out / "train-1.json")),
            # With one rank, Horovod exchanges gradients only in an elastic job.
            {"HOROVOD_ELASTIC": "1"},
            result=out / "train-1.json",
            needs=("module:horovod", "module:sklearn"),
            beside=True,
        ),
        Part(
            "training, two ranks through the host",
            (
                "horovodrun",
                "-np",
                "2",
                "--gloo",
                *train,
                *("--device", "cuda"),
                *recipe,
                *("--json", str(out / "train-2.json")),
            ),
            site=STAGED,
            result=out / "train-2.json",
            needs=("module:horovod", "module:sklearn", "program:horovodrun"),
            beside=True,
        ),
        Part(
            "tensorflow",
            (*pytest, "tests/tensorflow/test_gpu.py"),
            # Two ranks share the GPU.
            {"HVDC_TEST_GPU": "real", "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
            needs=("gpu:tensorflow", "module:horovod.tensorflow.mpi_ops", "module:pytest"),
            timeout=1800,
            beside=True,
        ),
    ]


def installations(wheels: Path, capability: str) -> tuple[list[Part], list[Part]]:
    """The parts that install packages: those that install wheels, and those that build Horovod first."""
    pip = f"{shlex.quote(sys.executable)} -m pip install --no-index --no-deps --no-compile --quiet"
    installed, builds = [], []
    for folder, site in ((wheels, SITE), (wheels / "staged", STAGED)):
        files = " ".join(shlex.quote(str(path)) for path in sorted(folder.glob("*.whl")))
        if files:
            # One by one, because pip installs no wheel at all if one of them is for another Python.
            into = f'{pip} --upgrade --target {shlex.quote(str(site))} "$wheel"'
            left_out = f'echo "{_LEFT_OUT}$(basename "$wheel")"'
            command = (
                f"good=1; for wheel in {files}; do "
                f"if {into}; then good=0; else {left_out}; fi; done; exit $good"
            )
            installed.append(Part(f"wheels for {site.name}", ("bash", "-c", command)))
    for sdist in sorted(wheels.glob("horovod-*.tar.gz")):
        for mode, site in (("nccl", SITE), ("staged", STAGED)):
            script = f"{shlex.quote(sys.executable)} -m hvd_compress.horovod_wheel --gpu {mode}"
            source = shlex.quote(str(sdist.absolute()))
            build = f"{script} --capabilities {capability} --sdist {source}"
            install = f'{pip} --upgrade --target {shlex.quote(str(site))} "$wheel"'
            command = f"set -e; wheel=$({build}); {install}"
            builds.append(Part(f"horovod, {mode}", ("bash", "-c", command), timeout=1800))
    return installed, builds


def compute_capability() -> str | None:
    """The first GPU's compute capability without the point, or None if nvidia-smi does not tell."""
    line = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    found = re.match(r"(\d+)\.(\d+)", line or "")
    return found[1] + found[2] if found else None


def output_of(*command: str) -> str | None:
    """A program's output, or None if the program is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


_START = """import os, site
for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    if folder in {sites}:
        site.addsitedir(folder)
"""


def write_start() -> None:
    """Writes a start-up module with which Python reads the ``.pth`` files of the installed wheels.

    Python reads them only in site folders, and setuptools provides distutils by such a file.
    """
    start = START / "sitecustomize.py"
    start.parent.mkdir(parents=True, exist_ok=True)
    start.write_text(_START.format(sites=[str(SITE), str(STAGED)]))


def environment(part: Part) -> dict[str, str]:
    """This process's environment with the installed wheels and the part's variables."""
    sites = [site for site in (part.site, SITE) if site]
    paths = [ROOT, *sites, START, os.environ.get("PYTHONPATH", "")]
    programs = [*(str(site / "bin") for site in sites), str(Path(sys.executable).parent)]
    programs.append(os.environ.get("PATH", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PATH": os.pathsep.join(programs),
        **part.variables,
    }


def there(kind: str, name: str, variables: Mapping[str, str]) -> bool:
    """Whether the program or module is found in this environment, or the framework finds a GPU."""
    if kind == "program":
        return shutil.which(name, path=variables["PATH"]) is not None
    code = _FOUND_GPU[name] if kind == "gpu" else f"import {name}"
    probe = [sys.executable, "-c", code]
    return subprocess.run(probe, env=dict(variables), capture_output=True).returncode == 0


def missing(part: Part) -> str | None:
    """The first of the part's needs that this machine lacks, or None."""
    variables = environment(part)
    for need in part.needs:
        kind, name = need.split(":")
        if not there(kind, name, variables):
            return f"a {name} that finds a GPU" if kind == "gpu" else f"{kind} {name}"
    return None


def table(variables: Mapping[str, str]) -> dict[str, bool]:
    """For each entry of :data:`NEEDED`, in words, whether it was found."""
    called = {"program": "{}", "module": "module {}", "gpu": "a {} that finds a GPU"}
    return {called[kind].format(name): there(kind, name, variables) for kind, name in NEEDED}


def run(part: Part, say: Callable[[str], None]) -> dict[str, object]:
    """Runs a part and returns its entry in the record."""
    lacks = missing(part)
    if lacks:
        say(f"{part.name}: not run, {lacks} is missing")
        return {"status": "not run", "missing": lacks}
    say(f"{part.name} ...")
    if part.result:
        part.result.unlink(missing_ok=True)
    start = time.monotonic()
    status, output = execute(part.command, environment(part), part.timeout)
    first = None
    if status and part.otherwise is not None:
        first = output
        say(f"{part.name}: again with {dict(part.otherwise)}")
        status, output = execute(
            part.command, {**environment(part), **part.otherwise}, part.timeout
        )
    entry: dict[str, object] = {
        "status": "passed" if status == 0 else "failed",
        "seconds": round(time.monotonic() - start, 1),
        "command": " ".join(part.command),
    }
    lines = output.strip().splitlines()
    entry["last_line"] = lines[-1] if lines else ""
    # A run in which every test was skipped shows nothing.
    if status == 0 and "pytest" in part.command and not re.search(r"\d+ passed", output):
        entry["status"] = "failed"
    if entry["status"] == "failed":
        entry["exit_status"] = status
        entry["output"] = output[-TAIL:]
    if first is not None:
        entry["first_output"] = first[-TAIL:]
    left_out = [line.removeprefix(_LEFT_OUT) for line in lines if line.startswith(_LEFT_OUT)]
    if left_out:
        entry["left_out"] = left_out
    if part.result and part.result.exists():
        entry["result"] = json.loads(part.result.read_text())
    say(f"{part.name}: {entry['status']}, {entry['seconds']} s; {entry['last_line']}")
    return entry


def execute(
    command: tuple[str, ...], variables: Mapping[str, str], timeout: float
) -> tuple[int, str]:
    """Runs a command and kills all processes that it leaves behind.

    Returns:
        The exit status (-1 after the timeout) and the output.
    """
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**variables, _MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        end(mark)  # Ranks run in sessions of their own and would keep the GPU.
        output, _ = process.communicate()
        return -1, f"{output}\ntook more than {timeout} s"
    finally:
        end(mark)


def end(mark: str) -> None:
    """Kills all processes with the mark in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # The process has ended, or belongs to another user.
            continue


_ABOUT = """import json
from benchmarks import machine
print(json.dumps([machine.description(), machine.versions()]))
"""


def about() -> dict[str, object]:
    """The record's description of the machine, its GPU and the versions of its software."""
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    variables = environment(Part("", ()))
    probe = subprocess.run(
        [sys.executable, "-c", _ABOUT], env=variables, capture_output=True, text=True
    )
    found, versions = json.loads(probe.stdout) if probe.returncode == 0 else ({}, {})
    versions |= {
        "nvcc": (output_of("nvcc", "--version") or "").split("\n")[-1] or None,
        "python": platform.python_version(),
    }
    gpu = output_of("nvidia-smi", query, "--format=csv,noheader")
    return {"machine": {**found, "gpu": gpu}, "versions": versions}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install from")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu" / "gpu-check.json")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run parts whose names begin so")
    parser.add_argument("--quick", action="store_true", help="run only the small benchmark")
    args = parser.parse_args()
    write_start()
    # The table is made before the wheels are installed, which provide some of its modules.
    found = table(environment(Part("", ())))
    for name, whether in found.items():
        print(f"gpu-check: {name:24} {'yes' if whether else 'NO'}", flush=True)
    record: dict[str, object] = {"schema": SCHEMA, **about(), "found": found, "parts": {}}
    entries = record["parts"]
    assert isinstance(entries, dict)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    chosen = [
        part
        for part in parts(args.wheels, args.quick)
        if not args.only or any(part.name.startswith(name) for name in args.only)
    ]
    keeping = threading.Lock()

    def keep(part: Part) -> None:
        entry = run(part, lambda text: print(f"gpu-check: {text}", flush=True))
        with keeping:  # Written after each part, so that nothing is lost if a later one breaks off.
            entries[part.name] = entry
            args.json.write_text(json.dumps(record, indent=1) + "\n")

    for part in chosen:
        if not part.beside:
            keep(part)
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        list(pool.map(keep, [part for part in chosen if part.beside]))
    counts = {
        status: sum(entry["status"] == status for entry in entries.values())
        for status in ("passed", "failed", "not run")
    }
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"gpu-check: {said}; {args.json}")
    return 0 if counts["passed"] and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
