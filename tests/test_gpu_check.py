"""scripts/gpu_check.py records the parts that pass, fail and cannot run, and continues."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.executors import missing_gpu
from tests.scripts.loading import load

gpu_check = load("gpu_check")
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"


def test_every_part_that_cannot_run_is_in_the_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    parts = ("sanitizer", "benchmark", "training", "tensorflow", "a rank", "ranks")
    parts = (*parts, "FSDP2", "DiLoCo", "all_reduce")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(out), "--quick", "--only", *parts],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    record = json.loads(out.read_text())
    statuses = {name: entry["status"] for name, entry in record["parts"].items()}
    assert len(statuses) == 14
    passed, failed = (list(statuses.values()).count(one) for one in ("passed", "failed"))
    assert done.returncode == (not passed or failed > 0), done.stdout
    assert record["found"]["module torch"] and "module torch" in done.stdout
    if missing_gpu():
        assert "passed" not in statuses.values(), "nothing passes where nothing can run"
        assert record["versions"]["torch"] and record["machine"]["cpu"]
        assert "expected a GPU" in record["parts"]["benchmark, quick"]["output"]
        assert "torch that finds a GPU" in record["parts"]["a rank by NCCL"]["missing"]
        assert "tensorflow that finds a GPU" in record["parts"]["tensorflow"]["missing"]


def _run(*command: str, **options: Any) -> dict[str, Any]:
    return dict(gpu_check.run(gpu_check.Part("it", command, **options), lambda _: None))


def test_a_part_that_takes_too_long_leaves_no_process_behind(tmp_path: Path) -> None:
    number = tmp_path / "number"
    script = f"echo begun; setsid sh -c 'echo $$ > {number}; exec sleep 600' & wait"
    entry = _run("sh", "-c", script, timeout=2)
    assert entry["status"] == "failed"
    assert entry["output"] == "begun\n\ntook more than 2 s"
    end = time.monotonic() + 30
    while Path("/proc", number.read_text().strip()).exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path("/proc", number.read_text().strip()).exists()


def test_a_build_with_a_warning_is_made_again_without_errors() -> None:
    script = "echo strict is $STRICT; test $STRICT = no"
    strict, lenient = {"STRICT": "yes"}, {"STRICT": "no"}
    entry = _run("sh", "-c", script, variables=strict, otherwise=lenient)
    assert (entry["status"], entry["last_line"]) == ("passed", "strict is no")
    assert entry["first_output"] == "strict is yes\n"
    assert "first_output" not in _run("sh", "-c", script, variables=lenient, otherwise=lenient)


def _wheel(folder: Path, tag: str) -> None:
    name = f"hvdc_{tag}"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}-none-any.whl", "w") as file:
        info = f"{name}-1.0.dist-info"
        file.writestr(f"{name}.py", "")
        file.writestr(f"{name}.pth", f"import sys; sys.modules['{name}_began'] = sys")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}-none-any\n"
        file.writestr(f"{info}/WHEEL", tags)
        file.writestr(f"{info}/RECORD", "")


def test_wheels_of_another_python_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other wheels are installed, and Python reads their ``.pth`` files."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("needs pip")
    monkeypatch.setattr(gpu_check, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu_check, "START", tmp_path / "start")
    for tag in ("cp27", "py3"):
        _wheel(tmp_path, tag)
    (part,), _ = gpu_check.installations(tmp_path, "90")
    entry = gpu_check.run(part, lambda _: None)
    assert (entry["status"], entry["left_out"]) == ("passed", ["hvdc_cp27-1.0-cp27-none-any.whl"])
    gpu_check.write_start()
    assert _run(sys.executable, "-c", "import hvdc_py3, hvdc_py3_began")["status"] == "passed"
