"""The page on clusters: its commands run on what they take for two hosts, and its files hold together."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import jobs

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "cluster.md").read_text()
EXAMPLES = ROOT / "docs" / "examples" / "cluster"
TRAINED = re.compile(
    r"loss: ([\d.]+) at first, ([\d.]+) at last.*bytes a step: (\d+) for (\d+)",
    re.DOTALL,
)


def _check(printed: str) -> None:
    found = TRAINED.search(printed)
    assert found, printed
    first, last, wire, plain = map(float, found.groups())
    assert last < first / 2 and wire < plain / 3.7, printed


def _command(program: str) -> list[str]:
    """The first command of a program on the page, without the script; for this machine's ranks."""
    text = PAGE.replace("\\\n", "")
    found = re.search(rf"^{program} (.*?)\s*(?:python )?docs/examples/\w+\.py", text, re.MULTILINE)
    assert found, program
    return shlex.split(found[1])


def test_horovodrun_on_two_hosts() -> None:
    options = _command("horovodrun")
    assert options == ["--gloo", "-np", "2", "-H", "host0:1,host1:1"]
    command = jobs.forked("two hosts", "docs/examples/torch_quickstart.py")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    _check(jobs.run("two hosts", 2, command, {"PYTHONPATH": os.pathsep.join(paths)}, check=True))


def test_torchrun_on_two_nodes() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = [
        option.replace("host0:29400", f"localhost:{port}") for option in _command("torchrun")
    ]
    assert f"localhost:{port}" in options
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *options,
                "docs/examples/ddp_quickstart.py",
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        printed = [node.communicate(timeout=jobs.TIMEOUT)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], printed
    _check("".join(printed))


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_example_is_on_the_page_and_names_files_that_exist(path: Path) -> None:
    assert f"```{{literalinclude}} examples/cluster/{path.name}\n" in PAGE
    text = path.read_text()
    named = re.findall(r"docs/examples/[\w/]+\.py", text)
    assert named and all((ROOT / name).exists() for name in named)
    if path.suffix == ".sh":
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert text.startswith("#!/bin/bash\n#SBATCH ")
    if path.suffix == ".yaml":
        assert all(
            {"apiVersion", "kind", "metadata", "spec"} <= one.keys()
            for one in yaml.safe_load_all(text)
        )
