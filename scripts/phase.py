#!/usr/bin/env python3
"""Run one command of the set-up and report it on a single line.

    python scripts/phase.py LOG TEXT COMMAND [ARGUMENT ...]

The line shows TEXT and the seconds since the start. The command's output goes into the file LOG, whose
end is shown if the command fails; the exit status is the command's.

The script needs only the standard library of any Python 3: it runs before there is an environment.
"""

import collections
import signal
import subprocess
import sys
import time
from pathlib import Path

SHOWN = 200
"""The number of lines of the log that are printed after a failure."""


def main(log: Path, text: str, command: list[str]) -> int:
    """Runs the command and returns its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    print(f"{text} ...", end="", file=sys.stderr, flush=True)
    with log.open("w") as sink:
        print("+", *command, file=sink, flush=True)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
        )
        # make also stops the command itself, whose exit status is to be returned.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        status = None
        while status is None:
            try:
                status = process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if sys.stderr.isatty():
                    seconds = time.monotonic() - start
                    print(f"\r{text} ... {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    took = f"{time.monotonic() - start:.0f} s"
    lead = f"\r{text} ... " if sys.stderr.isatty() else " "
    if status == 0:
        print(f"{lead}{took}", file=sys.stderr)
        return 0
    print(f"{lead}failed after {took}; the end of {log}:\n", file=sys.stderr)
    with log.open(errors="replace") as file:
        sys.stderr.writelines(collections.deque(file, maxlen=SHOWN))
    # Popen gives -N for a process ended by signal N; shells give 128 + N.
    return status if status > 0 else 128 - status


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
