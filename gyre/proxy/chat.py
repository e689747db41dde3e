"""The OpenAI chat completions dialect: what a client asks, what engines are asked, what the client is answered. Pure.

Whatever the client asked for, an engine is asked for a stream of tokens with their ids and log-probabilities. The
first leg of a request is a chat completion, which the engine renders and parses natively; a continuation is a plain
completion of the prompt's ids and the ids sampled so far.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre.proxy.recorder import Span

Json = dict[str, Any]

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
MAX_CHOICES = 16

#: Sampling options with the values that leave the distribution as the model gave it, temperature aside. They are sent
#: always, so that no default of an engine or of a model's generation_config.json applies unseen.
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_PENALTIES = ("presence_penalty", "frequency_penalty")
#: Engines sample at this temperature where a lower one is asked for, while the trainer would apply the one asked for.
_LEAST_TEMPERATURE = 0.01
_CONSTRAINTS = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "min_tokens", "use_beam_search")

#: Options that a continuation carries over as they are.
_CARRIED = (
    "temperature",
    *_NEUTRAL,
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "priority",
)
#: Options that a continuation needs no more, or handles itself.
_CONTINUABLE = {
    *_CARRIED,
    *("messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "seed", "stop"),
    *("include_stop_str_in_output", "min_tokens", "logprobs", "top_logprobs", "return_token_ids", "user", "metadata"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
    *("add_special_tokens", "reasoning_effort", "parallel_tool_calls", "store", "service_tier", "tools", "tool_choice"),
    *("prompt_cache_key", "safety_identifier", "response_format", *_PENALTIES),
}


class BadRequest(Exception):
    """The client's request is at fault; the message says how."""


@dataclass
class ChatRequest:
    """A client's chat completion request, checked as far as the proxy depends on it."""

    body: Json
    model: str
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    token_ids: bool
    choices: int
    max_tokens: int | None
    stop: list[str]
    sampling: Json
    masked: str
    continuable: bool

    @property
    def keep_stop(self) -> bool:
        """Whether a stop string, or the token that ends the answer, is part of its text."""
        return bool(self.body.get("include_stop_str_in_output"))

    @property
    def hides_reasoning(self) -> bool:
        """Whether the client wants an answer without its reasoning."""
        return self.body.get("include_reasoning") is False

    @property
    def buffered(self) -> bool:
        """Whether a streaming client is answered only when the answer is whole, because it may have to start over."""
        return not self.continuable


def _typed(body: Json, key: str, kinds: type | tuple[type, ...], default: Any) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise BadRequest(f"{key} has the wrong type")
    return value


def _number(body: Json, key: str, default: float) -> float:
    return _typed(body, key, (int, float), default)


def _stops(body: Json) -> list[str]:
    stop = _typed(body, "stop", (str, list), [])
    stops = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(s, str) for s in stops):
        raise BadRequest("stop has the wrong type")
    return [s for s in stops if s]


def _masked(body: Json, temperature: float) -> str:
    """Why tokens sampled so must not be trained on: the trainer applies the temperature and nothing else."""
    if temperature < _LEAST_TEMPERATURE:
        return "greedy"
    truncated = _number(body, "top_p", 1) < 1 or _number(body, "top_k", 0) > 0 or _number(body, "min_p", 0) > 0
    if truncated:
        return "truncated"
    if any(_number(body, key, 0) for key in _PENALTIES) or _number(body, "repetition_penalty", 1) != 1:
        return "penalties"
    if any(body.get(key) for key in _CONSTRAINTS) or _formatted(body) or _tool_grammar(body):
        return "constrained"
    return ""


def _formatted(body: Json) -> bool:
    form = _typed(body, "response_format", dict, {})
    return form.get("type", "text") != "text"


def _tools(body: Json) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice", "auto") != "none"


def _tool_grammar(body: Json) -> bool:
    """Whether engines may sample calls of tools under a grammar, which they do unless the model is left to itself."""
    tools = _typed(body, "tools", list, [])
    if not tools:
        return False
    choice = body.get("tool_choice")
    return choice not in (None, "auto", "none") or body.get("parallel_tool_calls") is False or any(map(_strict, tools))


def _strict(tool: Any) -> bool:
    if not isinstance(tool, dict):
        return False  # the engine refuses it
    function = tool.get("function")
    return bool(tool.get("strict") or (isinstance(function, dict) and function.get("strict")))


def _continuable(body: Json, parsed: bool) -> bool:
    """Whether an answer can go on elsewhere from its tokens; otherwise it starts over there."""
    unknown = any(value is not None and key not in _CONTINUABLE for key, value in body.items())
    counted = any(_number(body, key, 0) for key in _PENALTIES)  # they count sampled tokens, not the prompt's
    return not (unknown or counted or parsed or _tools(body) or _formatted(body) or (body.get("n") or 1) > 1)


def parse(body: Any, parsed: bool = False) -> ChatRequest:
    """Check a request; `parsed` says that no answer can be continued (engines parse reasoning or tool calls).

    Raises:
        BadRequest: it is not a chat completion request.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    choices = _typed(body, "n", int, 1)
    if not 1 <= choices <= MAX_CHOICES:
        raise BadRequest(f"n must be between 1 and {MAX_CHOICES}")
    temperature = _number(body, "temperature", 1.0)
    stream_options = _typed(body, "stream_options", dict, {})
    max_tokens = _typed(body, "max_completion_tokens", int, _typed(body, "max_tokens", int, None))
    sampling = {"temperature": temperature, "max_tokens": max_tokens, "n": choices}
    sampling |= {key: body[key] for key in (*_NEUTRAL, *_PENALTIES, "seed", "stop") if body.get(key) is not None}
    return ChatRequest(
        body=body,
        model=_typed(body, "model", str, ""),
        stream=_typed(body, "stream", bool, False),
        include_usage=bool(stream_options.get("include_usage")),
        logprobs=_typed(body, "logprobs", bool, False),
        top_logprobs=_typed(body, "top_logprobs", int, 0),
        token_ids=_typed(body, "return_token_ids", bool, False),
        choices=choices,
        max_tokens=max_tokens,
        stop=_stops(body),
        sampling=sampling,
        masked=_masked(body, temperature),
        continuable=_continuable(body, parsed),
    )


def first_leg(request: ChatRequest) -> Json:
    """The body of the first request to an engine: the client's, as a token stream, with nothing left to defaults."""
    body = {key: value for key, value in request.body.items() if value is not None}
    # Without its reasoning an engine would keep the tokens of an answer to itself; what is not asked for is not shown.
    for key in ("model", "stream_options", "top_logprobs", "include_reasoning"):
        body.pop(key, None)
    for key, value in _NEUTRAL.items():
        body.setdefault(key, value)
    body |= {"temperature": request.sampling["temperature"], "stream": True, "return_token_ids": True}
    body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return body


def room(request: ChatRequest, prompt: int, max_context: int) -> int:
    """Tokens that an answer to a prompt of this length may have."""
    left = max_context - prompt
    return left if request.max_tokens is None else min(request.max_tokens, left)


def continuation(request: ChatRequest, prompt: array[int], kept: array[int], max_context: int) -> Json:
    """The body of a plain completion that goes on after `kept` tokens of an answer; stop strings are the proxy's."""
    body = {key: request.body[key] for key in _CARRIED if request.body.get(key) is not None}
    for key, value in _NEUTRAL.items():
        body.setdefault(key, value)
    body |= {
        "prompt": [*prompt, *kept],
        "add_special_tokens": False,
        "max_tokens": room(request, len(prompt), max_context) - len(kept),
        "temperature": request.sampling["temperature"],
        "logprobs": request.top_logprobs,
        "stream": True,
        "return_token_ids": True,
    }
    if (least := request.body.get("min_tokens")) is not None:
        body["min_tokens"] = max(0, least - len(kept))
    if (seed := request.body.get("seed")) is not None:
        # The same seed would repeat the random numbers that the first tokens were drawn with.
        body["seed"] = (seed + 0x9E3779B97F4A7C15 * len(kept)) % (1 << 62)
    return body


@dataclass
class Choice:
    """One answer as it grows."""

    sampled: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    message: Json = field(default_factory=dict)
    shown_logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None

    def sample(self, span: Span, tokens: list[int], logprobs: list[float]) -> None:
        """Tokens that an engine sampled, under its span."""
        if tokens and (not self.spans or self.spans[-1] is not span):
            self.spans.append(span)
        self.sampled.extend(tokens)
        self.logprobs.extend(logprobs)
        span.tokens += len(tokens)

    def merge(self, delta: Mapping[str, Any]) -> None:
        """Add a delta to the message."""
        for key, value in delta.items():
            if value is None or key == "role":
                continue
            if key == "tool_calls":
                _merge_calls(self.message.setdefault(key, []), value)
            elif isinstance(value, str):
                self.message[key] = self.message.get(key, "") + value
            else:
                self.message[key] = value

    def finish(self, reason: str, stop_reason: Any = None) -> None:
        """The answer is whole."""
        self.finish_reason, self.stop_reason = reason, stop_reason


def _merge_calls(calls: list[Json], deltas: list[Json]) -> None:
    """Tool calls come in pieces: a name and id first, then parts of the arguments."""
    for delta in deltas:
        index = delta.get("index", len(calls))
        while len(calls) <= index:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[index], delta.get("function") or {}
        call["id"] = delta.get("id") or call["id"]
        call["type"] = delta.get("type") or call["type"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""


def chat_logprobs(choice: Json) -> tuple[list[float], list[Json]]:
    """Log-probabilities of a chat chunk's tokens, and its entries as a client would be shown them."""
    content = (choice.get("logprobs") or {}).get("content") or []
    return [entry["logprob"] for entry in content], content


def _entry(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}


def completion_logprobs(choice: Json, top: int) -> tuple[list[float], list[Json]]:
    """The same for a plain completion's chunk, its entries turned into chat's shape."""
    given = choice.get("logprobs") or {}
    values = given.get("token_logprobs") or []
    tops = given.get("top_logprobs") or [None] * len(values)
    entries = []
    for token, value, best in zip(given.get("tokens") or [], values, tops, strict=False):
        ranked = sorted((best or {}).items(), key=lambda item: -item[1])[:top]
        entries.append({**_entry(token, value), "top_logprobs": [_entry(*item) for item in ranked]})
    return values, entries


def usage(prompt: int, choices: list[Choice]) -> Json:
    """Token counts of an answer."""
    sampled = sum(len(choice.sampled) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def response(request: ChatRequest, head: Json, prompt: array[int], choices: list[Choice]) -> Json:
    """The plain answer; `head` has id, created and model."""
    shown = []
    for index, choice in enumerate(choices):
        message = {"role": "assistant", "content": None, **choice.message}
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        entry = {"index": index, "message": message, "finish_reason": choice.finish_reason, "logprobs": None}
        if request.logprobs:
            entry["logprobs"] = {"content": choice.shown_logprobs}
        if choice.stop_reason is not None:
            entry["stop_reason"] = choice.stop_reason
        if request.token_ids:
            entry["token_ids"] = list(choice.sampled)
        shown.append(entry)
    answer = {**head, "object": "chat.completion", "choices": shown, "usage": usage(len(prompt), choices)}
    if request.token_ids:
        answer["prompt_token_ids"] = list(prompt)
    return answer


def chunk(head: Json, index: int, delta: Json, **rest: Any) -> Json:
    """One piece of a streamed answer; of `rest` (logprobs, token_ids, stop_reason) what is not None is shown."""
    choice = {"index": index, "delta": delta, "finish_reason": rest.pop("finish_reason", None)}
    choice |= {key: value for key, value in rest.items() if value is not None}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def usage_chunk(head: Json, prompt: int, choices: list[Choice]) -> Json:
    """The last piece of a streamed answer, where the client asked for counts."""
    return {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage(prompt, choices)}


def error(message: str, kind: str, code: str | None = None) -> Json:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
