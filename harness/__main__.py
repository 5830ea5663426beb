"""Run the command `lastbit`: `python3 -m lastbit`, or `python3 harness` in a checkout that is not installed."""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).with_name("checkout"))

from lastbit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
