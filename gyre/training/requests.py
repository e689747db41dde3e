"""What trainers ask the feeder for, read from JSON bodies. Pure.

Bodies come from trainers of the same run, so a malformed one is a fault in the code or a stranger's: it is refused as a
whole, with a line that says what was wrong, before anything was done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre.training.ledger import Member

#: Micro-steps that one claim may ask for; a cell asks for as many as it has shards.
MOST = 1024


class Malformed(ValueError):
    """A body is not what its request takes."""


@dataclass(frozen=True)
class ClaimRequest:
    """POST /claim."""

    update: int
    member: Member
    finished: tuple[int, ...]
    holding: frozenset[int]  # in hand, not finished
    want: int
    wait: bool  # for up to a second, where there is nothing yet

    @classmethod
    def of(cls, body: Any) -> ClaimRequest:
        """Read a body.

        Raises:
            Malformed: something is missing or of another type, or `want` is out of bounds.
        """
        found = cls(
            _whole(body, "update"),
            (_whole(body, "rank"), _whole(body, "incarnation")),
            tuple(_list(body, "finished")),
            frozenset(_list(body, "holding")),
            _whole(body, "want"),
            _flag(body, "wait"),
        )
        if not 1 <= found.want <= MOST:
            raise Malformed(f"want is {found.want}; ask for 1 to {MOST} micro-steps")
        return found


@dataclass(frozen=True)
class SettleRequest:
    """POST /settle."""

    update: int
    core: Member
    ledgers: dict[Member, list[int]]
    final: bool

    @classmethod
    def of(cls, body: Any) -> SettleRequest:
        """Read a body: `ledgers` are lists of rank, incarnation and micro-steps.

        Raises:
            Malformed: something is missing or of another type, or a member has two ledgers.
        """
        core, listed = _list(body, "core"), _get(body, "ledgers", list)
        if len(core) != 2:
            raise Malformed("core is not a rank and an incarnation")
        ledgers: dict[Member, list[int]] = {}
        for entry in listed:
            if not isinstance(entry, list) or len(entry) != 3:
                raise Malformed("a ledger is not a rank, an incarnation and a list of micro-steps")
            named = dict(zip(("rank", "incarnation", "micro-steps"), entry, strict=True))
            member = _whole(named, "rank"), _whole(named, "incarnation")
            if member in ledgers:
                raise Malformed(f"member {member} has two ledgers")
            ledgers[member] = _list(named, "micro-steps")
        return cls(_whole(body, "update"), (core[0], core[1]), ledgers, _flag(body, "final"))


@dataclass(frozen=True)
class BarRequest:
    """POST /bar."""

    update: int
    member: Member
    reason: str

    @classmethod
    def of(cls, body: Any) -> BarRequest:
        """Read a body.

        Raises:
            Malformed: something is missing or of another type.
        """
        return cls(
            _whole(body, "update"), (_whole(body, "rank"), _whole(body, "incarnation")), _get(body, "reason", str)
        )


@dataclass(frozen=True)
class BarredRequest:
    """POST /barred."""

    update: int

    @classmethod
    def of(cls, body: Any) -> BarredRequest:
        """Read a body.

        Raises:
            Malformed: it names no update.
        """
        return cls(_whole(body, "update"))


def _get(body: Any, name: str, kind: type) -> Any:
    if not isinstance(body, Mapping):
        raise Malformed("the body is not a JSON object")
    if type(body.get(name)) is not kind:  # exactly: a bool is no whole number
        raise Malformed(f"{name} is missing" if name not in body else f"{name} is not of type {kind.__name__}")
    return body[name]


def _whole(body: Any, name: str) -> int:
    return _get(body, name, int)


def _flag(body: Any, name: str) -> bool:
    return _get(body, name, bool)


def _list(body: Any, name: str) -> list[int]:
    found = _get(body, name, list)
    if not all(type(item) is int for item in found):
        raise Malformed(f"{name} is not a list of whole numbers")
    return found
