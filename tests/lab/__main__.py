"""Entry point: ``python tests/lab``."""

from __future__ import annotations

import sys

from numalab.cli import main

sys.exit(main(sys.argv[1:]))
