"""`python -m plait`: the command where the package is not installed."""

from __future__ import annotations

from plait.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
