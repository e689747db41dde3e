"""Files that a person asks a command to write: refused before the work, written after it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from gyre.errors import UserError


def distinct(read: Mapping[str, str | Path], written: Mapping[str, str | None]) -> None:
    """Refuse to write over what is read, or twice to one file, before anything is done.

    Args:
        read: files that are read, by what they are called.
        written: files that are to be written, by their option; None where it is not given.

    Raises:
        UserError: two of them are one file, or one of them cannot be written.
    """
    seen = dict(read)
    for option, out in written.items():
        if out is None:
            continue
        for other, path in seen.items():
            if _same(Path(out), Path(path)):
                raise UserError(f"{option} and {other} both name {out}; name another file for {option}")
        writable(out)
        seen[option] = out


def _same(one: Path, other: Path) -> bool:
    """Whether writing the one changes the other; of a terminal or a pipe it does not."""
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)
    return one.resolve() == other.resolve()


def writable(out: str) -> None:
    """Find out before the work whether what it results in can be written.

    Raises:
        UserError: it cannot.
    """
    try:
        if Path(out).is_dir():
            raise UserError(f"cannot write {out}: it is a directory; name a file")
        if Path(out).is_file():
            open(out, "ab").close()
        elif not Path(out).exists():
            tempfile.TemporaryFile(dir=Path(out).parent).close()
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror}; name a file in a directory that can be written to"
        ) from error


def write(out: str | Path, text: str) -> None:
    """Write a file that a person asked for.

    Raises:
        UserError: it cannot be written.
    """
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; name a file that can be written") from error
