"""Reading what a client sent, without trusting any of it. Pure.

Whatever is wrong with a body ends in one `Invalid` that names the field; nothing here raises anything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gyre.proxy.dialects.errors import Invalid, Json

MAX_DEPTH = 100
MAX_CONTAINERS = 1_000_000

#: Engines keep integers in 64 bits, and some of them fail where one does not fit.
_INTEGERS = 1 << 63
_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def decode(data: bytes) -> Json:
    """The object that a body is; numbers are finite, texts valid Unicode, and the nesting is bounded.

    Of a key that occurs twice the last value counts, and is the only one that an engine sees.
    """
    openings = data.count(b"{") + data.count(b"[")
    if openings > MAX_CONTAINERS:
        raise Invalid("the body has too many parts")
    try:
        body = msgspec.json.decode(data)
    except RecursionError as error:
        raise Invalid("the body is nested too deeply") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise Invalid(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Invalid("the body must be a JSON object")
    if openings > MAX_DEPTH:
        _demand_shallow(body)
    return body


def _demand_shallow(body: Json) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inside = (part.values() if type(part) is dict else part for part in level)
        level = [value for values in inside for value in values if type(value) in (dict, list)]
        if not level:
            return
    raise Invalid(f"the body is nested more than {MAX_DEPTH} levels deep")


def demand(value: Any, kinds: type | tuple[type, ...], where: str) -> Any:
    """The value, if it is of one of these kinds; a number may be an integer, true and false are no numbers."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    fits = isinstance(value, (*allowed, int) if float in allowed else allowed)
    if not fits or (isinstance(value, bool) and bool not in allowed):
        raise Invalid("must be " + " or ".join(_NAMES[kind] for kind in allowed), where)
    if type(value) is int and not -_INTEGERS <= value < _INTEGERS:
        raise Invalid("is too large a number", where)
    return value


def path(where: str, key: str | int) -> str:
    """The name of a part of what `where` names."""
    return f"{where}.{key}" if where else str(key)


def optional(body: Json, key: str, kinds: type | tuple[type, ...], where: str = "", default: Any = None) -> Any:
    """A member of the right kind, or the default where it is missing or null."""
    value = body.get(key)
    return default if value is None else demand(value, kinds, path(where, key))


def required(body: Json, key: str, kinds: type | tuple[type, ...], where: str = "") -> Any:
    """A member that has to be there."""
    if body.get(key) is None:
        raise Invalid("is missing", path(where, key))
    return demand(body[key], kinds, path(where, key))


def refuse(body: Json, keys: Iterable[str]) -> None:
    """Raise Invalid where a body asks for one of these."""
    for key in keys:
        if body.get(key):
            raise Invalid("is not offered here", key)


def objects(values: list[Any], where: str) -> list[Json]:
    """The members of a list, which have to be objects."""
    return [demand(value, dict, path(where, index)) for index, value in enumerate(values)]


def positive(body: Json, key: str, default: int | None = None) -> int | None:
    """An integer of at least 1."""
    value = optional(body, key, int, default=default)
    if value is not None and value < 1:
        raise Invalid("must be at least 1", key)
    return value


def texts(body: Json, key: str) -> list[str]:
    """A list of strings; empty where it is missing."""
    values = optional(body, key, list, default=[])
    return [demand(value, str, path(key, index)) for index, value in enumerate(values)]
