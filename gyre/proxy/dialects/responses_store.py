"""Responses that an execution may come back to, as many as there is room for. Pure.

A response keeps what it added to its conversation, and the one before it; a conversation is the chain of them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from gyre.proxy.dialects.errors import ApiError, Invalid, Json
from gyre.proxy.dialects.intake import Intake

MAX_RESPONSES = 1024
MAX_BYTES = 16 << 20


@dataclass
class Kept:
    """One response: as it was answered, the messages it added, and the input it had."""

    response: Json
    messages: list[Json]
    input: list[Json]
    size: int = 0  # in bytes, of all of it
    weight: int = 0  # of the messages


class Store:
    """The responses of one execution; the ones used longest ago make room for new ones."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._answered: dict[str, Json] = {}  # items by id; no client's input takes the place of one
        self._given: dict[str, list[Json]] = {}  # the same of inputs, the newest last: many come again and again
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0

    def add(self, response: Json, messages: list[Json], given: Any) -> None:
        """Keep a response, the messages that it adds to its conversation, and its input as it was given."""
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given or ())
        items = [{"id": f"item_{response['id']}_{i}", **item} for i, item in enumerate(items)]
        kept = Kept(response, messages, items)
        kept.weight = len(msgspec.json.encode(messages))
        kept.size = len(msgspec.json.encode([response, items])) + kept.weight
        self._kept[response["id"]] = kept
        for item in _named(items):
            self._given.setdefault(item["id"], []).append(item)
        self._answered |= {item["id"]: item for item in _named(response["output"])}
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

    def item(self, identity: str) -> Json:
        """An item of a response that is kept: what was answered under this id, or was given last."""
        item = self._answered.get(identity) or (self._given.get(identity) or [None])[-1]
        if item is None:
            raise Invalid(f"Item with id '{identity[:100]}' not found.", code="item_not_found")
        return item

    def delete(self, identity: str) -> None:
        """Forget a response. Raises ApiError where it is not kept."""
        self.get(identity)
        self._drop(identity)

    def conversation(self, identity: str, intake: Intake) -> list[Json]:
        """The messages up to a response, its answer included, charged to `intake`.

        Raises Invalid where a part of them is not kept.
        """
        chain: list[list[Json]] = []
        at: str | None = identity
        while at is not None:
            if (kept := self._kept.get(at)) is None:
                where = "previous_response_id"
                error = Invalid(f"Previous response with id '{at[:100]}' not found.", code=f"{where}_not_found")
                error.param = where
                raise error
            self._kept.move_to_end(at)
            intake.grow(kept.weight)
            chain.append(kept.messages)
            at = kept.response.get("previous_response_id")
        return [message for messages in reversed(chain) for message in messages]

    def _drop(self, identity: str) -> None:
        kept = self._kept.pop(identity)
        self._bytes -= kept.size
        for item in _named(kept.response["output"]):
            if self._answered.get(item["id"]) is item:
                del self._answered[item["id"]]
        gone = {id(item) for item in kept.input}
        for name in {item["id"] for item in _named(kept.input)}:
            if others := [item for item in self._given.pop(name) if id(item) not in gone]:
                self._given[name] = others


def _named(items: list[Json]) -> list[Json]:
    """Those that can be referred to."""
    return [item for item in items if isinstance(item.get("id"), str) and item.get("type") != "item_reference"]
