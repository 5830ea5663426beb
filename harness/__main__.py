"""`python3 -m harness`: the same as the command `lastbit`."""

from harness.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
