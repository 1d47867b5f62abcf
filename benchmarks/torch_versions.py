"""The tests that passed with one version of PyTorch, by frontend; ``make test TORCH=2.15.0`` runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import json_files, machine
from benchmarks.command_line import Parser

SCHEMA = "hvd_compress/torch-version/1"

OUTCOMES = ("passed", "failed", "skipped")

_FRONTENDS = {
    "tests.contract.test_distributed": "all_reduce",
    "tests.distributed": "all_reduce",
    "tests.contract.test_ddp": "DDP",
    "tests.ddp": "DDP",
    "tests.fsdp": "FSDP2",
    "tests.diloco": "DiLoCo",
}
"""The frontends by the beginnings of their tests' modules."""


def counted(path: Path) -> dict[str, dict[str, int]]:
    """The number of tests of each frontend by their outcome, from pytest's JUnit XML."""
    found = {name: dict.fromkeys(OUTCOMES, 0) for name in _FRONTENDS.values()}
    for case in ElementTree.parse(path).iter("testcase"):
        module = case.attrib["classname"]
        names = [name for start, name in _FRONTENDS.items() if module.startswith(start)]
        if names:
            kinds = {child.tag for child in case}
            failed = kinds & {"failure", "error"}
            found[names[0]][
                "failed" if failed else "skipped" if "skipped" in kinds else "passed"
            ] += 1
    return found


def main(command_line: list[str] | None = None) -> int:
    """Writes the record of one run."""
    parser = Parser(prog="python -m benchmarks.torch_versions", description=__doc__)
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
