"""Lists of models and items, in the shapes of both dialects. Pure."""

from __future__ import annotations

from gyre.proxy.dialects.errors import Json

_LONG_AGO = "1970-01-01T00:00:00Z"


def model(name: str, max_context: int, anthropic: bool) -> Json:
    """One model; `max_context` is the number of tokens that prompt and answer may have together."""
    if anthropic:
        known = {"type": "model", "id": name, "display_name": name, "created_at": _LONG_AGO, "lifecycle": "active"}
        return {**known, "max_input_tokens": max_context, "max_tokens": max_context}
    return {"id": name, "object": "model", "created": 0, "owned_by": "gyre", "max_model_len": max_context}


def models(name: str, max_context: int, anthropic: bool) -> Json:
    """The list of the one model that there is."""
    data = [model(name, max_context, anthropic)]
    if anthropic:
        return {"data": data, "has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": data}


def items(given: list[Json]) -> Json:
    """The input of a response, newest item first."""
    ids = [item["id"] for item in reversed(given)]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": given[::-1], "has_more": False, **ends}
