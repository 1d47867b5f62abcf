"""``hvd-compress doctor``, in a single process and on ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hvd_compress import __version__, command_line, doctor, doctor_script
from tests import jobs


def test_alone_it_says_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["doctor"]) == 0
    printed = dict(re.findall(r"^(.+?):\s+(.+)$", capsys.readouterr().out, re.MULTILINE))
    assert printed["hvd_compress"] == __version__
    assert printed["CPU kernels"] in ("plain", "avx2", "avx512")
    assert printed["Horovod for torch"].startswith("gloo")
    assert printed["links"].startswith("not measured")


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("nowhere",))
    monkeypatch.setattr(doctor, "_version", lambda package: "not installed")

    def broken() -> str:
        raise OSError("expected a library")

    monkeypatch.setattr(doctor, "_instruction_set", broken)
    found = dict(doctor.installation())
    assert found["nowhere"] == found["Horovod for torch"] == "not installed"
    assert found["CPU kernels"] == "OSError: expected a library"


@pytest.mark.parametrize(
    ("launcher", "name"), (("horovodrun", "Horovod"), ("torchrun", "torch.distributed"))
)
def test_on_ranks_it_says_what_auto_would_choose(launcher: str, name: str) -> None:
    command = [sys.executable, "-m", "hvd_compress", "doctor", "--elements", "300000"]
    printed = jobs.run(launcher, 2, command)
    assert printed.count("CPU kernels:") == 1, printed
    assert f"2 ranks of {name}, 2 of them on the first host; 300,000 parameters" in printed, printed
    assert "hosts: 2" not in printed and "UserWarning" not in printed, printed
    assert re.search(r"Mbit/s that a rank sends: \d+ by", printed), printed
    assert re.search(r"plan \d+, decided", printed), printed


@pytest.mark.parametrize(
    ("launcher", "script"), (("horovodrun", "torch_quickstart"), ("torchrun", "ddp_quickstart"))
)
def test_with_a_script_it_measures_the_steps_of_the_script(launcher: str, script: str) -> None:
    path = f"docs/examples/{script}.py"
    command = [sys.executable, "-m", "hvd_compress", "doctor", "--", "python", path]
    printed = jobs.run(launcher, 2, command)
    assert re.search(rf"2 ranks of .*; python {path}$", printed, re.MULTILINE), printed
    assert re.search(r"step \d+, plan 1, decided: .* of the tensors", printed), printed
    assert re.search(r"predicted on other links:$", printed, re.MULTILINE), printed
    assert "accuracy on new samples" not in printed, "the script has trained on"


def test_a_script_needs_ranks_and_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command_line.main(["doctor", "--", "train.py"]) == 2
    assert "expected several ranks for a script, got one" in capsys.readouterr().err
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--epochs', '1']\n")
    with pytest.raises(ValueError, match="makes a DistributedDataParallel, got one that made none"):
        doctor_script.measure(["python3", str(script), "--epochs", "1"], "torch.distributed")
    for command in ([], ["python"], ["-m"]):
        with pytest.raises(ValueError, match="expected a script after --"):
            doctor_script.measure(command, "torch.distributed")
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="3"):
        doctor_script.measure([str(script)], "torch.distributed")
