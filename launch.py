#!/usr/bin/env python3
"""Start, resume and watch runs; `launch.py --help` lists the commands. Everything is in `gyre.cli`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

_VENV = Path(__file__).resolve().parent / ".venv"

if __name__ == "__main__":
    absent = [name for name in ("pydantic", "rich", "submitit", "yaml") if find_spec(name) is None]
    # Called with another Python than the one that `make setup` prepared: use that one.
    if absent and (_VENV / "bin/python").exists() and Path(sys.prefix) != _VENV:
        os.execv(_VENV / "bin/python", [str(_VENV / "bin/python"), *sys.argv])
    if absent:
        print(f"gyre: this Python has no {', '.join(absent)}; run `make setup` first", file=sys.stderr)
        sys.exit(2)
    from gyre.cli import main

    sys.exit(main())
