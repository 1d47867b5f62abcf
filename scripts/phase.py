#!/usr/bin/env python3
"""Run one command of the set-up or of a release, and report it on a single line.

    python scripts/phase.py LOG TEXT COMMAND [ARGUMENT ...]

The line shows TEXT and the seconds since the start. If stderr is no terminal and the command takes long,
further lines show the seconds and the last line of its output. The output goes into the file LOG, whose end
is shown if the command fails; the exit status is the command's.

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

HEARTBEAT_S = 30
"""The seconds between two lines about a command that still runs."""


def last_line(log: Path) -> str:
    """The last line of a log that has visible text, cut to 100 characters."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:100] for line in reversed(lines) if line.strip()), "")


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
        lead, told, status = " ", start, None
        while status is None:
            try:
                status = process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if sys.stderr.isatty():
                    lead = f"\r{text} ... "
                    print(f"{lead}{now - start:.0f} s", end="", file=sys.stderr, flush=True)
                elif now - told >= HEARTBEAT_S:
                    lead, told = f"\n{text} ... ", now
                    said = f"\n  {now - start:.0f} s: {last_line(log)}"
                    print(said, end="", file=sys.stderr, flush=True)
    took = f"{time.monotonic() - start:.0f} s"
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
