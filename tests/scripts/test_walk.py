"""A gradient's way through the package is the one that the pages show."""

from __future__ import annotations

import re

import pytest

from tests import jobs

FRONTENDS = ("horovod", "ddp", "fsdp", "diloco")


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_pages_list_the_files_of_a_step(frontend: str) -> None:
    launcher = "horovodrun" if frontend == "horovod" else "torchrun"
    printed = jobs.run(launcher, 2, jobs.forked(launcher, "scripts/walk.py", frontend), check=True)
    files = set(re.findall(r" \d+  (\w+/[\w/]+\.py)$", printed, re.MULTILINE))
    assert all((jobs.ROOT / "hvd_compress" / file).is_file() for file in files)
    # One from each thread: that of the backward pass, and that in which collectives end.
    assert {"engine/batch.py", "engine/run.py", "kernels/cpu_batch.py"} <= files
    assert f"{frontend}: {len(files)} files" in printed
    page = jobs.ROOT / "docs" / "architecture" / f"{frontend}.md"
    if page.exists():
        rows = re.findall(r"^\| `(\w+/[\w/]+\.py)` \|", page.read_text(), re.MULTILINE)
        listed = {row.replace("NAME", "allgather") for row in rows}
        assert listed == files, (listed - files, files - listed)
