"""A compressor that a script has made and forgotten is named when the process ends, and no other one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import jobs

REMEDIES = {
    "process_groups": (
        "call hvd_compress.ddp.register(model, compressor) on every rank",
        "set_requires_all_reduce(True) before",
        "(CompressedReduceScatter Int8(",
        "call step() of the OneBitAdam",
        "call step() of the DiLoCo",
        "give it to hvd_compress.distributed.all_reduce",
    ),
    "horovod": ("pass it to hvd.DistributedOptimizer as compression=",),
    "tensorflow": (
        "pass it to hvd.DistributedGradientTape as compression=",
        "compile the model with the optimizer that has it",
    ),
}
LAUNCHERS = {"process_groups": "torchrun", "horovod": "horovodrun", "tensorflow": "tensorflow"}
MISSED = "expected an exchange by the compressor"


def _run(frontend: str, how: str, folder: Path, ranks: int = 2) -> str:
    program = jobs.forked(LAUNCHERS[frontend], f"tests.unused.of_{frontend}", how, str(folder))
    printed = jobs.run(LAUNCHERS[frontend], ranks, program, check=True)
    assert printed.count("trained") >= ranks, printed
    return printed


@pytest.mark.parametrize("frontend", REMEDIES)
def test_a_compressor_without_an_exchange_is_named(frontend: str, tmp_path: Path) -> None:
    printed = _run(frontend, "forgotten", tmp_path)
    for remedy in REMEDIES[frontend]:
        assert printed.count(remedy) >= 2, printed


@pytest.mark.parametrize("frontend", REMEDIES)
def test_a_compressor_that_has_exchanged_is_not(frontend: str, tmp_path: Path) -> None:
    assert MISSED not in _run(frontend, "used", tmp_path)


def test_nothing_is_said_on_a_single_rank(tmp_path: Path) -> None:
    assert MISSED not in _run("horovod", "forgotten", tmp_path, ranks=1)
