"""How much memory a process tree takes, counted so that shared pages are not counted twice."""

from __future__ import annotations

import psutil


def tree_pss_mb(pid: int, extra: tuple[int, ...] = ()) -> float:
    """Proportional set size of a process, all its descendants and the processes in `extra`, in MiB.

    Processes that end meanwhile, or belong to somebody else, count as nothing.
    """
    processes: dict[int, psutil.Process] = {}
    for root in (pid, *extra):
        try:
            process = psutil.Process(root)
            for member in (process, *process.children(recursive=True)):
                processes[member.pid] = member
        except psutil.Error:
            continue
    total = 0
    for process in processes.values():
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20
