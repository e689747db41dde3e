"""Faults injected by coordinate, for tests of the whole. Nothing happens unless the environment asks for it.

GYRE_FAULT holds one or more coordinates with commas between them, such as `commit:2:before_rename`,
`update:3:claimed@1` (on rank 1 only) or `update:3:claimed@1.2` (in worker 2 of rank 1's cell only). A process that
reaches one kills itself with SIGKILL; where GYRE_FAULT_MARK names a file, it writes the coordinate and its process id
there and sleeps instead, so that a test can kill the whole tree at that moment. A mark that exists is not made again:
the run that follows passes by.

Coordinates: `commit:<version>:before_rename`, `commit:<version>:saving`, `update:<update>:claimed`,
`update:<update>:joined`, `update:<update>:reducing`, `update:<update>:stepping`.
"""

from __future__ import annotations

import os
import signal
import time

_SLEEP_SECONDS = 3600.0


def fault(coordinate: str, rank: int, worker: int = 0) -> None:
    """Die here, or leave a mark and sleep, if this coordinate was asked for."""
    asked = os.environ.get("GYRE_FAULT")
    if not asked or not {coordinate, f"{coordinate}@{rank}", f"{coordinate}@{rank}.{worker}"} & set(asked.split(",")):
        return
    mark = os.environ.get("GYRE_FAULT_MARK")
    if mark is None:
        os.kill(os.getpid(), signal.SIGKILL)
    elif not os.path.exists(mark):
        with open(f"{mark}.{os.getpid()}", "w") as file:
            file.write(f"{coordinate}@{rank} {os.getpid()}\n")
        os.replace(file.name, mark)
        time.sleep(_SLEEP_SECONDS)
