"""The exceptions of Gyre, one tree. Pure: imports nothing.

Whatever goes wrong ends in one of these at the edge of the module that met it; foreign errors (of vLLM, DeepSpeed,
Slurm, the operating system) are mapped where their library is imported, and nowhere else.
"""

from __future__ import annotations

#: Exit codes of every Gyre process.
EXIT_OK = 0
EXIT_FAULT = 1  # an internal fault: traceback in the log, one line on the screen
EXIT_USER = 2  # bad input: one line that says what to change
EXIT_RESTART = 75  # a rank lost the store or a child, or counts as lost: its restarter starts it again (EX_TEMPFAIL)
EXIT_INTERRUPTED = 130


class GyreError(Exception):
    """Base of every exception that Gyre raises on purpose."""


class UserError(GyreError):
    """Bad input. The message is one line that says what to change; the process ends with exit code 2."""


class StoreLost(GyreError):
    """The store's host is gone or does not answer; the rank leaves and its restarter decides."""


class Superseded(GyreError):
    """A newer incarnation of this rank, or a newer attempt of this run, exists."""


class ChildFailed(GyreError):
    """A child process (engine, trainer, feeder, proxy) died or refused an operation."""


class StreamConflict(GyreError):
    """An update's ledgers do not partition its stream, or a word of the stream came out of turn."""


class WeightsMismatch(GyreError):
    """Pulled or loaded weights do not have the checksum or the identity that was announced."""


class ReduceFailed(GyreError):
    """A group could not be made, or a reduce on it failed or was called off; the group is dead, the sums are not."""


class LinkFailed(GyreError):
    """A neighbouring pipeline stage is gone, or a transfer with it was called off; the cell cannot go on."""


class IllegalTransition(GyreError):
    """A cell was to enter a state that no transition leads to; the message carries the states before."""


class InvariantBroken(GyreError):
    """One of the fifteen invariants of docs/architecture.md does not hold. The message carries its number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}")
        self.number = number
