"""A Horovod for CPUs is built against any torch, and nothing of the caller's turns it into another."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hvd_compress import horovod_wheel

EXCERPT = """\
execute_process(COMMAND ${PY_EXE} -c "import torch; from torch.utils.cpp_extension import CUDA_HOME; print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)"
                OUTPUT_VARIABLE Pytorch_CUDA OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REGEX REPLACE "No (CUDA|ROCm) runtime[^\\n]*\\n?" "" Pytorch_CUDA "${Pytorch_CUDA}")
string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)
"""  # noqa: E501
"""An excerpt of Horovod's FindPytorch.cmake."""


@pytest.fixture
def torch_for_cuda(tmp_path: Path) -> Path:
    """A folder with as much of PyPI's torch, beside a toolkit, as Horovod's build looks at."""
    package = tmp_path / "site" / "torch"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import version")
    (package / "version.py").write_text("cuda = '13.0'")
    (package / "utils" / "__init__.py").touch()
    (package / "utils" / "cpp_extension.py").write_text("CUDA_HOME = '/usr/local/cuda'")
    return package.parent


def _found_cuda(find_pytorch: Path, site: Path) -> str:
    program = find_pytorch.with_name("print.cmake")
    program.write_text(f'include("{find_pytorch}")\nmessage("CUDA: ${{Pytorch_CUDA}}")\n')
    done = subprocess.run(
        ["cmake", f"-DPY_EXE={sys.executable}", "-P", str(program)],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.rpartition("CUDA: ")[2].strip()


def test_a_build_for_cpus_finds_no_cuda_in_torch(torch_for_cuda: Path, tmp_path: Path) -> None:
    (edit,) = (e for e in horovod_wheel.edits_for(["torch"], None) if "FindPytorch" in e.file)
    file = tmp_path / edit.file
    file.parent.mkdir(parents=True)
    file.write_text(EXCERPT)
    assert _found_cuda(file, torch_for_cuda) == "TRUE"
    horovod_wheel.apply_edits(tmp_path, [edit])
    assert _found_cuda(file, torch_for_cuda) == "FALSE"


def test_a_build_for_gpus_asks_torch() -> None:
    edits = horovod_wheel.edits_for(["torch"], horovod_wheel.Gpu("nccl", "90"))
    assert not any("FindPytorch" in edit.file for edit in edits)


def test_every_edit_finds_its_place() -> None:
    archive = horovod_wheel.default_cache() / "horovod" / f"horovod-{horovod_wheel.VERSION}.tar.gz"
    if not archive.exists():
        pytest.skip("Horovod's source is not in the cache; building its wheel puts it there")
    edits = [*horovod_wheel.EDITS, *horovod_wheel.CPU_EDITS, *horovod_wheel.CUDA_EDITS]
    with tarfile.open(archive) as tar:
        for edit in edits:
            member = tar.extractfile(f"horovod-{horovod_wheel.VERSION}/{edit.file}")
            assert member and member.read().decode().count(edit.old) == 1, edit.file


def test_an_edit_that_finds_no_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    edit = horovod_wheel.Edit("setup.py", "old", "new")
    with pytest.raises(SystemExit, match=r"expected 'old' once in setup.py, got 0"):
        horovod_wheel.apply_edits(tmp_path, [edit])


def test_the_callers_environment_does_not_turn_it_into_a_build_for_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setenv("HOROVOD_WITH_NVTX", "1")
    monkeypatch.setenv("MAKEFLAGS", "-j --jobserver-auth=3,4")
    monkeypatch.setenv("PIP_CERT", "kept")
    built = horovod_wheel.build_environment(horovod_wheel.build_variables(["torch"], None))
    settings = {key: value for key, value in built.items() if key.startswith("HOROVOD_")}
    assert settings == {
        "HOROVOD_CMAKE": horovod_wheel.cmake(),
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_PYTORCH": "1",
    }
    assert "jobserver" not in built["MAKEFLAGS"]
    assert built["PIP_CERT"] == "kept"


def test_a_build_for_mpi_is_another_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_wheel, "installed_version", lambda name: "1.0")
    monkeypatch.setattr(horovod_wheel, "mpi_version", lambda: "mpirun (Open MPI) 4.1.4")
    plain, mpi = (horovod_wheel.build_variables(["torch"], None, mpi) for mpi in (False, True))
    assert plain.keys() - mpi.keys() == {"HOROVOD_WITHOUT_MPI"}
    assert mpi.keys() - plain.keys() == {"HOROVOD_WITH_MPI"}
    made = [horovod_wheel.ingredients(["torch"], variables, None) for variables in (plain, mpi)]
    assert made[0]["edits"] != made[1]["edits"]
    assert ("mpi" in made[0], "mpi" in made[1]) == (False, True)


def test_a_build_for_mpi_needs_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="--mpi needs mpicxx and mpirun on the PATH"):
        horovod_wheel.mpi_version()


def test_another_choice_of_frameworks_is_another_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_wheel, "installed_version", lambda name: "1.0")
    both = ["tensorflow", "torch"]
    made = [
        horovod_wheel.ingredients(f, horovod_wheel.build_variables(f, None), None)
        for f in (["torch"], both)
    ]
    assert made[0]["edits"] != made[1]["edits"]
    assert "tensorflow" not in made[0]
