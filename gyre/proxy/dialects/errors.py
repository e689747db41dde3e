"""Errors as each dialect says them, and what an engine's errors mean to a client. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

Json = dict[str, Any]

_OPENAI_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
#: As vLLM says that a prompt does not fit: the limit, and the prompt's length where it counted it.
_LIMIT = r"maximum context length is (?P<most>\d+) tokens.*?"
_TOO_LONG = (
    re.compile(_LIMIT + r"contains (?:at least )?(?P<length>\d+) input tokens", re.S),
    re.compile(_LIMIT + r"upper bound for (?P<bound>\d+) input tokens", re.S),
    re.compile(r"Input length \((?P<length>\d+)\) exceeds model's maximum context length \((?P<most>\d+)\)"),
)

#: As it says that a prompt leaves room for nothing: how much room there was. A client's own number is checked before.
_NO_ROOM = re.compile(r"max_tokens must be at least 1, got (?P<room>0|-\d+)")


class ApiError(Exception):
    """A request that gets an error for its answer: an HTTP status, what is wrong, and OpenAI's words for it.

    `context` is set where the prompt does not fit: its length in tokens (or the least that it is), and the limit;
    `allow` names the methods that are possible where the one used is not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        context: tuple[int, int] | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.context = context
        self.allow = allow

    @property
    def kind(self) -> str:
        """OpenAI's type of error."""
        return "server_error" if self.status >= 500 else _OPENAI_KINDS.get(self.status, "invalid_request_error")


class Invalid(ApiError):
    """The body is at fault; `param` says where."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, f"{param}: {message}" if param else message, code=code, param=param)


def openai(error: ApiError) -> Json:
    """The error as OpenAI's endpoints say it."""
    words = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": words}


def anthropic(error: ApiError, request_id: str) -> Json:
    """The error as Anthropic's endpoints say it."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if error.context is not None:
        length, most = error.context
        message = f"prompt is too long: {length} tokens > {most} maximum"
    kind = _ANTHROPIC_KINDS.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _context(message: str, most: int) -> tuple[int, int] | None:
    if found := _NO_ROOM.search(message):
        return most - int(found["room"]), most
    for pattern in _TOO_LONG:
        if found := pattern.search(message):
            numbers = {key: int(value) for key, value in found.groupdict().items()}
            length = numbers.get("length", numbers.get("bound", numbers["most"]) + 1)
            return length, numbers["most"]
    return None


def from_engine(status: int, body: bytes, max_context: int) -> ApiError:
    """What an engine of this context, or the proxy in its place, said in OpenAI's shape; the message is kept."""
    words: Any = None
    try:
        words = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        pass
    inner = words.get("error") if isinstance(words, dict) else None
    if isinstance(inner, str):
        inner = {"message": inner}
    if not isinstance(inner, dict):
        inner = {"message": body.decode("utf-8", "replace")[:2000]}
    message, code, param = inner.get("message"), inner.get("code"), inner.get("param")
    message = message if isinstance(message, str) and message else "the engine refused the request"
    context = _context(message, max_context) if status == 400 else None
    return ApiError(
        status,
        message,
        code="context_length_exceeded" if context else code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        context=context,
    )
