"""``python -m hvd_compress.perfmodel predict``: the same as ``hvd-compress predict``."""

import sys

from hvd_compress.perfmodel.cli import main

if __name__ == "__main__":
    sys.exit(main())
