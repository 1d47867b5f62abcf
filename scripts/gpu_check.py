#!/usr/bin/env python3
"""Build, test and measure the CUDA kernels on a machine with a GPU, and write one JSON record.

    make gpu-check PYTHON=/path/to/python WHEELS=folder

Nothing is downloaded. PYTHON has a torch for CUDA; what it lacks otherwise (pytest, hypothesis, tqdm,
and a Horovod for NCCL) comes from the wheels in WHEELS, which are installed beside the checkout and
not into PYTHON. NCCL refuses two ranks on one GPU, so that the run with two takes a second Horovod,
built for CUDA without HOROVOD_GPU_OPERATIONS, from WHEELS/staged. Where WHEELS holds Horovod's source
(horovod-0.28.1.tar.gz) instead, both are built from that, by scripts/horovod_wheel.py.

The part for TensorFlow takes a TensorFlow for CUDA in PYTHON, and a Horovod that was built with it, in
PYTHON or from WHEELS: what is built here is for torch.

Each part is recorded, whether it succeeds or not, and the others run all the same. The exit status
tells whether all of them succeeded.

Only the standard library is used.
"""

import argparse
import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "hvd_compress/gpu-check/1"
SITE, STAGED = (ROOT / "build" / "gpu" / name for name in ("site", "staged"))
_FOUND_GPU = "import tensorflow as tf; assert tf.config.list_physical_devices('GPU')"
TAIL = 4000
"""Characters of a failed part's output that are recorded."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing that is checked.

    Attributes:
        name: in the record.
        command: what is run, in the checkout.
        variables: of its environment.
        timeout: seconds.
        site: packages that come before those of all parts.
        result: a JSON file that it writes, for the record.
        needs: a program or module without which it is recorded as not run, or a framework that has to
            have found a GPU.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout: float = 900
    site: Path | None = None
    result: Path | None = None
    needs: tuple[str, ...] = ()


def parts(wheels: Path | None, quick: bool) -> list[Part]:
    """Everything, in order."""
    python = sys.executable
    out = ROOT / "build" / "gpu"
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    # Under the sanitizer, allocations of their own show writes next to a tensor.
    checked = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    few = "on_gpu and (golden or many_blocks or taken_back or square_sum)"
    architecture = compute_capability()
    chosen = f" -DHVDC_CUDA_ARCHITECTURES={architecture}" if architecture else ""
    build = {"HVDC_CUDA": "on", "CMAKE_ARGS": f"-DHVDC_WERROR=ON{chosen}"}
    train = (python, "-m", "benchmarks.train", "--framework", "torch", "--model", "lenet")
    recipe = ("--compression", "none", "onebit", "int8", "ternary", "ecq", "--steps", "60")
    ranks = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    found = [
        Part("native", (python, "setup.py", "--quiet", "build_ext", "--inplace"), build),
        Part("parity", (*pytest, "tests/cuda", "-k", "on_gpu"), needs=("module:pytest",)),
        *(
            Part(
                f"sanitizer {tool}",
                (
                    "compute-sanitizer",
                    "--tool",
                    tool,
                    "--error-exitcode",
                    "9",
                    *(("--leak-check", "no") if tool == "memcheck" else ()),
                    *pytest,
                    "tests/cuda",
                    "-k",
                    few,
                ),
                checked,
                needs=("program:compute-sanitizer", "module:pytest"),
                timeout=1800,
            )
            for tool in ("memcheck", "racecheck")
        ),
        Part(
            "benchmark",
            (
                python,
                "-m",
                "benchmarks.codec",
                "--device",
                "cuda",
                "--json",
                str(out / "codec.json"),
                *(("--quick",) if quick else ()),
            ),
            result=out / "codec.json",
            needs=("module:tqdm",),
        ),
        Part(
            "training, one rank by NCCL",
            (*train, "--device", "cuda", *recipe, "--json", str(out / "train-1.json")),
            # With one rank Horovod exchanges only where the job may grow.
            {"HOROVOD_ELASTIC": "1"},
            result=out / "train-1.json",
            needs=("module:horovod",),
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
            needs=("module:horovod", "program:horovodrun"),
        ),
        *(
            Part(
                f"training with DDP, {how}",
                (
                    *ranks,
                    str(count),
                    "scripts/train_ddp.py",
                    "--json",
                    str(out / f"ddp-{count}.json"),
                ),
                {"OMP_NUM_THREADS": "4"},  # torchrun would set 1, and say so.
                result=out / f"ddp-{count}.json",
                needs=("module:torch",),
            )
            for count, how in ((1, "one rank by NCCL"), (2, "two ranks through the host"))
        ),
        Part(
            "tensorflow",
            (*pytest, "tests/tensorflow/test_gpu.py"),
            # Two ranks share the GPU.
            {"HVDC_TEST_GPU": "real", "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
            needs=("gpu:tensorflow", "module:horovod.tensorflow.mpi_ops", "module:pytest"),
            timeout=1800,
        ),
    ]
    return [*installations(wheels, architecture or "90"), *found] if wheels else found


def installations(wheels: Path, capability: str) -> list[Part]:
    """What the parts need beside the checkout, from files."""
    pip = f"{shlex.quote(sys.executable)} -m pip install --no-index --no-deps --no-compile --quiet"
    found = []
    for folder, site in ((wheels, SITE), (wheels / "staged", STAGED)):
        files = " ".join(shlex.quote(str(path)) for path in sorted(folder.glob("*.whl")))
        if files:
            command = f"{pip} --upgrade --target {shlex.quote(str(site))} {files}"
            found.append(Part(f"wheels for {site.name}", ("bash", "-c", command)))
    for sdist in sorted(wheels.glob("horovod-*.tar.gz")):
        for mode, site in (("nccl", SITE), ("staged", STAGED)):
            script = f"{shlex.quote(sys.executable)} scripts/horovod_wheel.py --gpu {mode}"
            source = shlex.quote(str(sdist.absolute()))
            build = f"{script} --capabilities {capability} --sdist {source}"
            install = f'{pip} --upgrade --target {shlex.quote(str(site))} "$wheel"'
            command = f"set -e; wheel=$({build}); {install}"
            found.append(Part(f"horovod, {mode}", ("bash", "-c", command), timeout=1800))
    return found


def compute_capability() -> str | None:
    """The first GPU's, without its point; None where there is no answer."""
    line = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    found = re.match(r"(\d+)\.(\d+)", line or "")
    return found[1] + found[2] if found else None


def output_of(*command: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def environment(part: Part) -> dict[str, str]:
    """This process's, the packages beside the checkout, and what the part asks for."""
    sites = [site for site in (part.site, SITE) if site]
    paths = [ROOT, *sites, os.environ.get("PYTHONPATH", "")]
    programs = [*(str(site / "bin") for site in sites), str(Path(sys.executable).parent)]
    programs.append(os.environ.get("PATH", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PATH": os.pathsep.join(programs),
        **part.variables,
    }


def missing(part: Part) -> str | None:
    """What the part needs and the machine lacks."""
    variables = environment(part)
    for need in part.needs:
        kind, name = need.split(":")
        if kind == "program":
            there = shutil.which(name, path=variables["PATH"]) is not None
        else:
            code = _FOUND_GPU if kind == "gpu" else f"import {name}"
            probe = [sys.executable, "-c", code]
            there = subprocess.run(probe, env=variables, capture_output=True).returncode == 0
        if not there:
            return f"a {name} that finds a GPU" if kind == "gpu" else f"{kind} {name}"
    return None


def run(part: Part, say: Callable[[str], None]) -> dict[str, object]:
    """Runs one part; its entry in the record."""
    lacks = missing(part)
    if lacks:
        say(f"{part.name}: not run, {lacks} is missing")
        return {"status": "not run", "missing": lacks}
    say(f"{part.name} ...")
    if part.result:
        part.result.unlink(missing_ok=True)
    start = time.monotonic()
    try:
        done = subprocess.run(
            part.command,
            cwd=ROOT,
            env=environment(part),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=part.timeout,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = -1, f"{error.output or ''}\ntook more than {part.timeout} s"
    entry: dict[str, object] = {
        "status": "passed" if status == 0 else "failed",
        "seconds": round(time.monotonic() - start, 1),
        "command": " ".join(part.command),
    }
    lines = output.strip().splitlines()
    entry["last_line"] = lines[-1] if lines else ""
    # A run in which everything was skipped has shown nothing.
    if status == 0 and "pytest" in part.command and not re.search(r"\d+ passed", output):
        entry["status"] = "failed"
    if entry["status"] == "failed":
        entry["exit_status"] = status
        entry["output"] = output[-TAIL:]
    if part.result and part.result.exists():
        entry["result"] = json.loads(part.result.read_text())
    say(f"{part.name}: {entry['status']}, {entry['seconds']} s; {entry['last_line']}")
    return entry


def machine() -> dict[str, object]:
    """What the record is about."""
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    versions = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"
    probe = subprocess.run([sys.executable, "-c", versions], capture_output=True, text=True)
    torch, cuda = json.loads(probe.stdout) if probe.returncode == 0 else (None, None)
    return {
        "gpu": output_of("nvidia-smi", query, "--format=csv,noheader"),
        "nvcc": (output_of("nvcc", "--version") or "").split("\n")[-1] or None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch,
        "torch_cuda": cuda,
        "commit": output_of("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install from")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu" / "gpu-check.json")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="how the parts' names begin")
    parser.add_argument("--quick", action="store_true", help="a small benchmark")
    args = parser.parse_args()
    record: dict[str, object] = {"schema": SCHEMA, "machine": machine(), "parts": {}}
    entries = record["parts"]
    assert isinstance(entries, dict)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for part in parts(args.wheels, args.quick):
        if args.only and not any(part.name.startswith(name) for name in args.only):
            continue
        entries[part.name] = run(part, lambda text: print(f"gpu-check: {text}", flush=True))
        # After each part: whatever happens next, what is known is kept.
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    good = bool(entries) and all(entry["status"] == "passed" for entry in entries.values())
    print(f"gpu-check: {'all passed' if good else 'NOT all passed'}; {args.json}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
