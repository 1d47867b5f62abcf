"""Changes the rate of all links of a lab while a job runs, called by one of its ranks.

``python -m benchmarks.lab.change_rate 200mbit``
"""

from __future__ import annotations

import os
import sys

from benchmarks.lab import link, rate
from benchmarks.lab.errors import LabError
from benchmarks.lab.isolation import enter_first_network
from benchmarks.lab.network import hosts, limit


def main(command_line: list[str] | None = None) -> int:
    """Changes both ends of every link; packets in their queues are dropped, and TCP sends them again."""
    arguments = sys.argv[1:] if command_line is None else command_line
    try:
        if len(arguments) != 1:
            raise ValueError(f"expected one rate, got {len(arguments)}")
        wanted = rate.parse(arguments[0])
        if "LAB_HOSTS" not in os.environ:
            raise LabError("expected to be started by a rank of python -m benchmarks.lab")
        enter_first_network()
        limit(hosts(int(os.environ["LAB_HOSTS"])), link.from_environment(wanted))
    except (LabError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
