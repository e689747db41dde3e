"""How much memory a process tree takes, counted so that shared pages are not counted twice."""

from __future__ import annotations

import psutil


def tree_pss_mb(pid: int) -> float:
    """Proportional set size of a process and all its descendants, in MiB.

    Processes that end meanwhile, or belong to somebody else, count as nothing.
    """
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0.0
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20
