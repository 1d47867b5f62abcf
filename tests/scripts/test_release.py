"""A wheel, built from the sdist, holds the package and nothing else, and serves every Python 3."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hvd_compress
from tests.scripts.loading import load

release = load("release")

ANY_LINUX = re.compile(r"py3-none-linux_\w+")
"""auditwheel, which finds the tag of a release, is not among the tests' dependencies."""


def _build(what: str, source: Path, out: Path, address: str = "") -> Path:
    # Not optimized, which takes a fraction of the time; CUDA has tests of its own.
    fast = {"CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Debug", "HVDC_CUDA": "off"}
    variables = {**fast, "HVDC_ADDRESS": address}
    code = f"from setuptools import build_meta; build_meta.{what}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (made,) = (one for one in out.iterdir() if one.suffix != ".egg-info")
    return made


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.copy_sources(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("build_sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder)  # Python 3.11 before 3.11.4 has no filter=.
    (source,) = folder.iterdir()
    return _build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


def test_the_sdist_is_the_checkout(sdist: Path) -> None:
    """Tests and pages read records, examples, golden files and more. Hidden files are for git and CI."""
    with tarfile.open(sdist) as archive:
        names = {entry.name.partition("/")[2] for entry in archive if entry.isfile()}
    made = {name for name in names if name == "PKG-INFO" or ".egg-info/" in name}
    visible = {name for name in release.sources() if not name.startswith(".")}
    assert names - made == visible | {".clang-format"}


def test_the_wheel_is_whole_and_has_nothing_else(wheel: Path) -> None:
    assert release.faults(wheel, ANY_LINUX) == []


def test_one_version_for_all(wheel: Path) -> None:
    version = hvd_compress.__version__
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"hvd_compress-{version}.dist-info/METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata


def _targets(metadata: Path) -> list[str]:
    """The targets of links and pictures in a long description."""
    description = metadata.joinpath("METADATA").read_text().partition("\n\n")[2]
    assert description.startswith("# hvd_compress")
    return re.findall(r"\]\((\S+?)\)", description)


def test_no_link_of_the_description_is_broken(checkout: Path, tmp_path: Path) -> None:
    """A package index shows the description without the files around it."""
    made = _build("prepare_metadata_for_build_wheel", checkout, tmp_path)
    assert all(target.startswith("https://") for target in _targets(made))
    assert "Project-URL" not in made.joinpath("METADATA").read_text()


def test_links_of_the_description_lead_to_the_projects_address(
    checkout: Path, tmp_path: Path
) -> None:
    address = "https://forge.example/owner/name"
    made = _build("prepare_metadata_for_build_wheel", checkout, tmp_path, address)
    urls = re.findall("Project-URL: .*, (.*)", made.joinpath("METADATA").read_text())
    ours = [target for target in _targets(made) if target.startswith(address)]
    assert len(ours) > 20 and len(urls) == 3
    version = re.escape(hvd_compress.__version__)
    for target in [*ours, *urls]:
        kind, file = re.fullmatch(
            rf"{address}/(raw|blob)/v{version}/([^#]+)(?:#.*)?", target
        ).groups()
        assert (checkout / file).is_file(), target
        assert (kind == "raw") == file.endswith(".svg"), target


def test_its_library_asks_for_no_python(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(release.LIBRARIES[0], tmp_path))
    assert ctypes.CDLL(str(library)).hvdc_abi_version() > 0
    needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True)
    assert "python" not in needed.stdout


def test_faults_are_named(wheel: Path, tmp_path: Path) -> None:
    bad = tmp_path / wheel.name.replace("py3-none", "cp311-cp311")
    with zipfile.ZipFile(wheel) as good, zipfile.ZipFile(bad, "w") as archive:
        for name in good.namelist():
            if name != "hvd_compress/py.typed":
                archive.writestr(name, b"")
        archive.writestr("hvd_compress/lib/kernels.o", b"")
    found = release.faults(bad, ANY_LINUX)
    assert any(text.startswith("expected a tag like") for text in found)
    assert "expected hvd_compress/py.typed, which is missing" in found
    assert "expected no hvd_compress/lib/kernels.o" in found
    assert len(found) == 3


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    assert release.version_of(sys.executable) == f"python3.{sys.version_info.minor}"
    with pytest.raises(SystemExit, match="expected /nowhere/python to be a Python that runs, got"):
        release.version_of("/nowhere/python")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho not set up >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(SystemExit, match="that runs, got status 127: not set up"):
        release.version_of(str(broken))
