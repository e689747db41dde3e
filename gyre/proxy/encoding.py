"""JSON of whatever a client may have sent. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def encode(value: Any, ordered: bool = False) -> bytes:
    """A value as JSON; `ordered`: the keys of objects sorted, so that equal values give equal bytes."""
    try:
        return msgspec.json.encode(value, order="sorted" if ordered else None)
    except (TypeError, ValueError, OverflowError, RecursionError):  # half of a character, or numbers beyond 64 bits
        return json.dumps(value, sort_keys=ordered, default=str).encode()
