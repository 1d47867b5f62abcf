"""Writes the golden files: ``python -m tests.golden.make [--force] [NAME...]``.

Run by hand, for a new codec. A file that exists is a promise to whoever has stored or sent such bytes, and
is left as it is; bytes that have to change belong to a new codec id.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_compress.codecs import NoiseKey
from tests.codecs import cases
from tests.codecs.rows import ROWS, Row
from tests.golden import gradients

FOLDER = Path(__file__).parent / "files"


def golden_file(row: Row) -> Path:
    """Where a row's bytes stand: the payload, then the residual as little-endian float32."""
    return FOLDER / f"{row.name}.bin"


def encode(row: Row) -> bytes:
    """Returns the bytes of the reference's payload and residual for the golden gradient."""
    residual = gradients.residual()
    payload = cases.encode(
        row.codec,
        gradients.SHAPE,
        gradients.gradient(),
        feedback=row.feedback,
        residual=residual,
        noise=noise(),
    )
    return payload.tobytes() + residual.astype("<f4").tobytes()


def noise() -> NoiseKey:
    """The golden files' position in the noise."""
    return NoiseKey(gradients.SEED, gradients.RANK, gradients.TENSOR, gradients.STEP)


def main() -> int:
    """Writes what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="rows of tests/codecs/rows.py; all by default")
    parser.add_argument("--force", action="store_true", help="overwrite, breaking the promise")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    refused = False
    for row in ROWS:
        if args.names and row.name not in args.names:
            continue
        path = golden_file(row)
        if path.exists() and not args.force:
            changed = path.read_bytes() != encode(row)
            print(f"{row.name}: exists{', and DIFFERS from the reference' if changed else ''}")
            refused |= changed
            continue
        path.write_bytes(encode(row))
        print(f"{row.name}: written")
    return int(refused)


if __name__ == "__main__":
    sys.exit(main())
