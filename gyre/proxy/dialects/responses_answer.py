"""OpenAI responses from chat completions: the answer, whole and as events. Pure.

The answer is made of items, begun and finished one after the other: reasoning, text, calls of functions. Whole or as
events, it is the same `_Items` that makes them, so that both are the same.
"""

from __future__ import annotations

from typing import Any

from gyre.proxy.dialects import hidden
from gyre.proxy.dialects.calls import Event, choice_of, counts_of, reasoning_of
from gyre.proxy.dialects.errors import ApiError, Json
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.reading import optional
from gyre.proxy.dialects.responses import call_of, to_chat, wants, wants_logprobs
from gyre.proxy.dialects.responses_store import Store
from gyre.proxy.dialects.responses_tools import CustomInput, called, search_words

_CALLS = {"function_call": "fc", "custom_tool_call": "ctc", "tool_search_call": "tsc"}
_KINDS = {"reasoning": "rs", "message": "msg", **_CALLS}
#: What a call has before the model has said it.
_EMPTY: Json = {
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
    "tool_search_call": {"arguments": {}},
}


class ResponseCall:
    """One request for a response; the answer is kept in the execution's `store` unless the client says otherwise."""

    def __init__(self, body: Json, max_context: int, store: Store, intake: Intake | None = None) -> None:
        self.chat, self._new = to_chat(body, max_context, store, intake)
        self._called = called(body)
        self.stream = bool(self.chat.get("stream"))
        self.completion = False
        self.last = b""
        self._body = body
        self._store = store if optional(body, "store", bool, default=True) else None
        self._logprobs = wants_logprobs(body)
        self._sealed = wants(body, "reasoning.encrypted_content")
        self._number = 0
        self._head: Json | None = None
        self._output: list[Json] = []
        self._open: Json | None = None  # the item that is not finished
        self._tool = -1  # the tool call that it is
        self._arguments = ""  # of a search, which is told when it is whole
        self._custom = CustomInput()
        self._entries: list[Json] = []  # log-probabilities of its text
        self._finish: str | None = None
        self._counts = (0, 0)

    # -- whole -------------------------------------------------------------------------------------------------------
    def answer(self, given: Json) -> Json:
        """The response: what its events would have come to."""
        choice = choice_of(given)
        said = dict(choice.get("message") or {})
        if calls := said.get("tool_calls"):
            said["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
        self.events({**given, "choices": [{**choice, "delta": said}]})
        return self.end()[-1][1]["response"]

    # -- as events ---------------------------------------------------------------------------------------------------
    def events(self, chunk: Json) -> list[Event]:
        """Events of a chunk."""
        found: list[Event] = []
        if self._head is None:
            self._head = {"id": f"resp_{self._identity(chunk)}", "created_at": chunk.get("created") or 0}
            self._head["model"] = chunk.get("model")
            for kind in ("response.created", "response.in_progress"):
                found.append(self._event(kind, response=self._response("in_progress")))
        if chunk.get("usage"):
            self._counts = counts_of(chunk)
        choice = choice_of(chunk)
        delta = choice.get("delta") or {}
        entries = (choice.get("logprobs") or {}).get("content") or [] if self._logprobs else []
        if thought := reasoning_of(delta):
            found += self._begin("reasoning", summary=[], content=[]) + self._text("reasoning_text", thought, [])
        if text := delta.get("content"):
            found += self._begin("message", role="assistant", content=[]) + self._text("output_text", text, entries)
        for call in delta.get("tool_calls") or ():
            found += self._call(call)
        self._finish = choice.get("finish_reason") or self._finish
        return found

    def end(self) -> list[Event]:
        """The end of the last item, and of the response."""
        status = "incomplete" if self._finish in ("length", "content_filter") else "completed"
        found = self._close(status)
        response = self._response(status)
        if self._store is not None:
            self._store.add(response, [*self._new, self._message()], self._body.get("input"))
        return [*found, self._event(f"response.{status}", response=response)]

    def failed(self, error: ApiError, request_id: str) -> list[Event]:
        """The error, as an event of its own before the response has begun, and as the response's end after that."""
        if self._head is None:
            words = {"code": error.code or error.kind, "message": error.message, "param": error.param}
            return [self._event("error", **words)]
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        response = {**self._response("failed"), "error": {"code": code, "message": error.message}}
        return [self._event("response.failed", response=response)]

    def idle(self) -> Event | None:
        """Nothing that a client could count on: comments are all."""
        return None

    # -- items -------------------------------------------------------------------------------------------------------
    @staticmethod
    def _identity(given: Json) -> str:
        return str(given.get("id")).removeprefix("chatcmpl-")

    def _begin(self, kind: str, **words: Any) -> list[Event]:
        if self._open is not None and self._open["type"] == kind and kind not in _CALLS:
            return []
        found = self._close("completed")
        assert self._head is not None
        identity = f"{_KINDS[kind]}_{self._head['id'].removeprefix('resp_')}_{len(self._output)}"
        self._open = {"id": identity, "type": kind, "status": "in_progress", **words}
        return [*found, self._item("response.output_item.added", item=dict(self._open))]

    def _text(self, kind: str, text: str, entries: list[Json]) -> list[Event]:
        assert self._open is not None
        found: list[Event] = []
        if not self._open["content"]:
            self._open["content"] = [self._part(kind, "", [])]
            self._entries = []
            found.append(self._inner("response.content_part.added", part=self._part(kind, "", [])))
        self._open["content"][0]["text"] += text
        self._entries += entries
        words = {"logprobs": entries} if kind == "output_text" else {}
        return [*found, self._inner(f"response.{kind}.delta", delta=text, **words)]

    @staticmethod
    def _part(kind: str, text: str, entries: list[Json]) -> Json:
        part = {"type": kind, "text": text}
        return {**part, "annotations": [], "logprobs": entries} if kind == "output_text" else part

    def _call(self, call: Json) -> list[Event]:
        function, index = call.get("function") or {}, call.get("index", 0)
        found: list[Event] = []
        if self._open is None or self._open["type"] not in _CALLS or index != self._tool:
            name = function.get("name") or ""
            words = self._called.get(name) or {"type": "function_call", "name": name}
            words = {"call_id": call.get("id") or f"call_{index}", **words}
            kind = words.pop("type")
            found += self._begin(kind, **words, **_EMPTY[kind])
            self._tool, self._arguments, self._custom = index, "", CustomInput()
        assert self._open is not None
        arguments = function.get("arguments")
        if arguments and self._open["type"] == "custom_tool_call":
            found += self._input(self._custom.feed(arguments))
        elif arguments and self._open["type"] == "tool_search_call":
            self._arguments += arguments
        elif arguments:
            self._open["arguments"] += arguments
            kind = "response.function_call_arguments.delta"
            found.append(self._item(kind, item_id=self._open["id"], delta=arguments))
        return found

    def _input(self, text: str) -> list[Event]:
        """A piece of a custom tool's input."""
        assert self._open is not None
        kind = "response.custom_tool_call_input.delta"
        return [self._item(kind, item_id=self._open["id"], delta=text)] if text else []

    def _close(self, status: str) -> list[Event]:
        if (item := self._open) is None:
            return []
        found: list[Event] = []
        if item["type"] == "function_call":
            words = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            found.append(self._item("response.function_call_arguments.done", **words))
        elif item["type"] == "custom_tool_call":
            found += self._input(self._custom.end())
            item["input"] = self._custom.text
            words = {"item_id": item["id"], "input": item["input"]}
            found.append(self._item("response.custom_tool_call_input.done", **words))
        elif item["type"] == "tool_search_call":
            item["arguments"] = search_words(self._arguments)
        elif item["content"]:
            kind, text = item["content"][0]["type"], item["content"][0]["text"]
            part = self._part(kind, text, self._entries)
            item["content"] = [part]
            words = {"logprobs": self._entries} if kind == "output_text" else {}
            found.append(self._inner(f"response.{kind}.done", text=text, **words))
            found.append(self._inner("response.content_part.done", part=part))
            if item["type"] == "reasoning" and self._sealed:
                item["encrypted_content"] = hidden.seal(text)
        item["status"] = status
        found.append(self._item("response.output_item.done", item=item))
        self._output.append(item)
        self._open = None
        return found

    def _message(self) -> Json:
        """The answer as the next prompt has it."""
        texts = [item["content"][0]["text"] for item in self._output if item["type"] == "message"]
        thoughts = [item["content"][0]["text"] for item in self._output if item["type"] == "reasoning"]
        calls = [item for item in self._output if item["type"] in _CALLS]
        message: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
        if thoughts:
            message["reasoning"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = [call_of(item) for item in calls]
        return message

    # -- words -------------------------------------------------------------------------------------------------------
    def _event(self, kind: str, **words: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **words}
        self._number += 1
        return kind, event

    def _item(self, kind: str, **words: Any) -> Event:
        return self._event(kind, output_index=len(self._output), **words)

    def _inner(self, kind: str, **words: Any) -> Event:
        assert self._open is not None
        return self._item(kind, item_id=self._open["id"], content_index=0, **words)

    def _response(self, status: str) -> Json:
        assert self._head is not None
        prompt, sampled = self._counts
        body, done = self._body, status != "in_progress"
        usage = {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
        usage |= {
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        reason = "content_filter" if self._finish == "content_filter" else "max_output_tokens"
        return {
            **self._head,
            "object": "response",
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "output": list(self._output) if done else [],
            "usage": usage if done else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": self._store is not None,
            "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
            "truncation": "disabled",
        }
