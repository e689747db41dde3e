"""Names in this host's shared memory, by which what a run left there is found and removed."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED = Path("/dev/shm")


def shared_prefix(run_dir: Path | str, attempt: int | None = None) -> str:
    """Prefix of the names of shared memory of a run, of one attempt if given."""
    path = Path(run_dir).resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"gyre-{path.name[:64]}-{digest}-" + (f"{attempt}-" if attempt is not None else "")


def remove_shared(run_dir: Path | str, keep_attempt: int | None = None) -> list[str]:
    """Remove what this run left in this host's shared memory, except for one attempt's; returns the names removed."""
    kept = shared_prefix(run_dir, keep_attempt) if keep_attempt is not None else None
    removed = []
    for path in SHARED.glob(shared_prefix(run_dir) + "*"):
        if kept is None or not path.name.startswith(kept):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
