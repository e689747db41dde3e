"""Responses that an execution may come back to, as many as there is room for. Pure.

A response keeps what it added to its conversation, and the one before it; a conversation is the chain of them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gyre.proxy.dialects.errors import ApiError, Invalid, Json

MAX_RESPONSES = 1024
MAX_BYTES = 16 << 20


@dataclass
class Kept:
    """One response: as it was answered, the messages it added, and the input it had."""

    response: Json
    messages: list[Json]
    input: list[Json]
    size: int = field(default=0)


class Store:
    """The responses of one execution; the ones used longest ago make room for new ones."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._items: dict[str, Json] = {}
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0

    def add(self, response: Json, messages: list[Json], given: Any) -> None:
        """Keep a response, the messages that it adds to its conversation, and its input as it was given."""
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given or ())
        items = [{"id": f"item_{response['id']}_{i}", **item} for i, item in enumerate(items)]
        kept = Kept(response, messages, items)
        kept.size = len(msgspec.json.encode([response, messages, items]))
        self._kept[response["id"]] = kept
        self._items |= {item["id"]: item for item in [*items, *response["output"]] if isinstance(item.get("id"), str)}
        self._bytes += kept.size
        while len(self._kept) > self._most or (self._bytes > self._most_bytes and self._kept):
            self._drop(next(iter(self._kept)))

    def get(self, identity: str) -> Kept:
        """A response. Raises ApiError where it is not kept, or no more."""
        if (kept := self._kept.get(identity)) is None:
            message = f"Response with id '{identity[:100]}' not found."
            raise ApiError(404, message, param="response_id", code="not_found")
        self._kept.move_to_end(identity)
        return kept

    def item(self, identity: str) -> Json | None:
        """An item of a response that is kept."""
        found = self._items.get(identity)
        if found is None:
            raise Invalid(f"Item with id '{identity[:100]}' not found.", code="item_not_found")
        return found if found.get("type") != "item_reference" else None

    def delete(self, identity: str) -> None:
        """Forget a response. Raises ApiError where it is not kept."""
        self.get(identity)
        self._drop(identity)

    def conversation(self, identity: str) -> list[Json]:
        """The messages up to a response, its answer included. Raises Invalid where a part of them is not kept."""
        chain: list[list[Json]] = []
        at: str | None = identity
        while at is not None:
            if (kept := self._kept.get(at)) is None:
                where = "previous_response_id"
                error = Invalid(f"Previous response with id '{at[:100]}' not found.", code=f"{where}_not_found")
                error.param = where
                raise error
            self._kept.move_to_end(at)
            chain.append(kept.messages)
            at = kept.response.get("previous_response_id")
        return [message for messages in reversed(chain) for message in messages]

    def _drop(self, identity: str) -> None:
        kept = self._kept.pop(identity)
        self._bytes -= kept.size
        for item in [*kept.input, *kept.response["output"]]:
            self._items.pop(item.get("id"), None)
