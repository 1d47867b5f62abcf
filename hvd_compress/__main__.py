"""``python -m hvd_compress``: the same as ``hvd-compress``."""

import sys

from hvd_compress.command_line import main

if __name__ == "__main__":
    sys.exit(main())
