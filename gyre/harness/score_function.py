"""Calls a scoring function in a process of its own: score_function.py SPEC WORKSPACE TASK DESCRIPTOR ROOT.

Run as a script without Gyre's modules, so that it starts in a few hundredths of a second. The score, or what went
wrong, goes to the descriptor as one JSON object; what the function prints goes to the execution's log.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(spec: str, root: str) -> Callable[[Path, Any], float]:
    """The function of ``module:name`` or ``file.py:name``; both are looked for from `root`."""
    place, _, name = spec.rpartition(":")
    sys.path.insert(0, root)
    if place.endswith(".py"):
        path = Path(root, place)
        sys.path.insert(0, str(path.parent))
        found = importlib.util.spec_from_file_location(path.stem, path)
        if found is None or found.loader is None:
            raise ImportError(f"cannot load {path}")
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


def main(spec: str, workspace: str, task: str, descriptor: str, root: str) -> None:
    """Score, and write {"score": ...} or {"error": ...}."""
    try:
        score = load(spec, root)(Path(workspace), json.loads(Path(task).read_text()))
        answer = {"score": float(score)}
    except Exception as error:  # a fault of the user's function, for the user to read
        import traceback

        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(int(descriptor), json.dumps(answer)[:4096].encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
