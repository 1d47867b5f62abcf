"""The native kernels under sanitizers: altered payloads, random tensors, threads and a fork."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.builds import build

# With more, gcc takes minutes for the plain lanes under these sanitizers.
FLAGS = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0")
SECONDS = 10
"""The seconds for which each program looks for errors."""

ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def run(command: list[str], timeout: float) -> str:
    """Runs a program and returns what it wrote; it fails the test if it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def address() -> Path:
    """The drivers with AddressSanitizer and UndefinedBehaviorSanitizer."""
    return build(
        "sanitized/address",
        "fuzz_main encode_main batch_main rans_main cuda_main",
        *FLAGS,
        "-DHVDC_NATIVE_TESTS=ON",
        "-DHVDC_EMULATED_CUDA=ON",
        "-DHVDC_SANITIZE=address,undefined",
    )


@pytest.fixture(scope="module")
def printed(address: Path) -> Iterator[dict[str, Future[str]]]:
    """The output of the programs of one thread, which run side by side."""
    with ThreadPoolExecutor(2) as threads:
        yield {
            name: threads.submit(run, [str(address / name), str(SECONDS)], 30 * SECONDS)
            for name in ("fuzz_main", "cuda_main")
        }


def test_altered_payloads(printed: dict[str, Future[str]]) -> None:
    """Valid payloads with a few changes, and plain noise, are refused or decoded, never followed."""
    assert int(printed["fuzz_main"].result().split()[0]) > 100


def test_cuda_kernels_on_the_host(printed: dict[str, Future[str]]) -> None:
    """Beside the CPU's kernels: the same bytes, aligned accesses, nothing read beyond a buffer."""
    assert int(printed["cuda_main"].result().split()[-2]) > 5


def test_random_tensors(address: Path) -> None:
    """Every codec, shape and number of threads, three callers at once, and forked children."""
    tensors = int(run([str(address / "encode_main"), str(SECONDS)], SECONDS + 120).split()[0])
    assert tensors > 100


def test_batches(address: Path) -> None:
    """Several tensors a call are encoded and decoded as by single calls."""
    batches = int(run([str(address / "batch_main"), str(SECONDS)], SECONDS + 120).split()[0])
    assert batches > 5


def test_states_of_the_entropy_code(address: Path) -> None:
    """Every frequency, and states at both ends of ranges of one quotient, against a division."""
    assert run([str(address / "rans_main")], 120) == "16384 frequencies\n"


def test_threads_do_not_race() -> None:
    """The same tensors under ThreadSanitizer, which cannot follow a fork."""
    options = ("-DHVDC_NATIVE_TESTS=ON", "-DHVDC_SANITIZE=thread")
    folder = build("sanitized/thread", "encode_main batch_main", *FLAGS, *options)
    encode = [str(folder / "encode_main"), str(SECONDS), "1", "nofork"]
    assert "tensors" in run(encode, SECONDS + 60)
    assert "batches" in run([str(folder / "batch_main"), str(SECONDS)], SECONDS + 60)


def test_fuzzer(tmp_path: Path) -> None:
    """libFuzzer, guided by coverage, on the same target."""
    clang = shutil.which("clang++-14") or shutil.which("clang++")
    if clang is None:
        pytest.skip("libFuzzer needs clang++")
    program = build(
        "sanitized/fuzz",
        "fuzz_decode",
        *FLAGS,
        f"-DCMAKE_CXX_COMPILER={clang}",
        "-DHVDC_FUZZ=ON",
        "-DHVDC_SANITIZE=address,undefined",
    )
    limits = [f"-max_total_time={SECONDS}", "-max_len=4096", "-timeout=20"]
    # What libFuzzer takes for its memory begins with that of the process that starts it.
    limits += ["-rss_limit_mb=0", "-malloc_limit_mb=512"]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    output = run(
        [str(program / "fuzz_decode"), *limits, f"-artifact_prefix={tmp_path}/", str(corpus)],
        SECONDS + 60,
    )
    assert "DONE" in output
