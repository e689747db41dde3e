"""What the operating system allows this process."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> None:
    """Allow as many open files as there may be: who serves a thousand connections has more than most allow at first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
