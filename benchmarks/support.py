"""The tests that passed with one set of versions, by frontend; ``make test TORCH=2.15.0`` runs it.

On a machine of another kind, ``scripts/emulated.sh`` runs it for the kernels' tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import json_files, machine
from benchmarks.command_line import Parser

SCHEMA = "hvd_compress/support/1"

OUTCOMES = ("passed", "failed", "skipped")

FRONTENDS = {
    "all_reduce": ("tests.contract.test_distributed", "tests.distributed"),
    "DDP": ("tests.contract.test_ddp", "tests.ddp"),
    "FSDP2": ("tests.fsdp",),
    "DiLoCo": ("tests.diloco",),
    "Horovod, PyTorch": ("tests.contract.test_torch", "tests.torch"),
    "Horovod, TensorFlow": ("tests.contract.test_tensorflow", "tests.tensorflow"),
    "Keras": ("tests.contract.test_keras", "tests.keras"),
}
"""The beginnings of the names of each frontend's test modules."""

KERNELS = {
    "golden files": ("tests.golden",),
    "kernels": ("tests.kernels",),
    "codecs of other packages": ("tests.codecs.test_registry",),
}
"""The same for the tests of what is below the frontends."""


def counted(path: Path) -> dict[str, dict[str, int]]:
    """The number of tests of each frontend, and of the kernels, by outcome, from pytest's JUnit XML.

    Those without tests in the run are left out.
    """
    found: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        module = case.attrib["classname"]
        for part, starts in (FRONTENDS | KERNELS).items():
            if module.startswith(starts):
                kinds = {child.tag for child in case}
                failed = "failed" if kinds & {"failure", "error"} else None
                skipped = "skipped" if "skipped" in kinds else None
                counts = found.setdefault(part, dict.fromkeys(OUTCOMES, 0))
                counts[failed or skipped or "passed"] += 1
    return found


def main(command_line: list[str] | None = None) -> int:
    """Writes the record of one run."""
    parser = Parser(prog="python -m benchmarks.support", description=__doc__)
    parser.add_argument("xml", type=Path, help="the JUnit XML that pytest has written")
    parser.add_argument("--json", type=Path, required=True, help="the record to write")
    args = parser.parse_args(command_line)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine.description(),
        "versions": machine.versions(),
        "tests": counted(args.xml),
    }
    json_files.write(args.json, record)
    print(f"{args.json}: {record['tests']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
