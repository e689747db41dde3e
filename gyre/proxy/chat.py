"""What a client asks, and what engines are asked for it: chat completions and plain ones. Pure.

Whatever the client asked for, an engine is asked for a stream of tokens with their ids and log-probabilities, under the
sampling that the client named and nothing left to defaults. An engine that goes on with an answer gets the very same
request, with what it has become so far beside it (`gyre.splice.Extension`): the prompt's ids and those of the answer.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from gyre.splice import ARGUMENT, Extension, History

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

#: Options that mean the same for the rest of an answer as for the whole of it, or that engines apply to the whole.
_CONTINUABLE = {
    *("messages", "prompt", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "seed"),
    *("temperature", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "min_tokens", "logprobs"),
    *("top_logprobs", "return_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias"),
    *("allowed_token_ids", "priority", "user", "metadata", "chat_template", "chat_template_kwargs", "documents"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort", "include_reasoning"),
    *("parallel_tool_calls", "store", "service_tier", "tools", "tool_choice", "prompt_cache_key", "safety_identifier"),
    *("response_format", *_NEUTRAL, *_PENALTIES),
}
#: Options that are judged one by one, or have no say in what is sampled. Of any other, only an engine knows.
_JUDGED = {
    *(*_CONTINUABLE, *_CONSTRAINTS, "kv_transfer_params", "mm_processor_kwargs", "cache_salt", "request_id"),
    *("truncate_prompt_tokens", "return_tokens_as_token_ids"),
}
#: Options of the client that engines are not asked: the proxy answers them, or they are no client's to set.
_KEPT_BACK = ("model", "stream_options", "top_logprobs", "include_reasoning", "kv_transfer_params")
#: Options beside the messages that change what they are rendered to.
_RENDERING = (
    *("tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)


class BadRequest(Exception):
    """The client's request is at fault; the message says how."""


@dataclass
class Request:
    """A client's request for a chat completion or a plain one, checked as far as the proxy depends on it."""

    body: Json
    is_chat: bool
    model: str
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    token_ids: bool
    choices: int
    sampling: Json
    masked: str  # why what is sampled must not be trained on, whatever the engine says
    doubted: str  # the same, unless the engine says that nothing else has a say in what is sampled
    continuable: bool  # an answer can go on elsewhere from its tokens; otherwise it starts over there
    grammar: bool  # tools that engines may sample calls of under a grammar, which cannot go on from the middle
    text_only: bool  # no images or the like, whose place in a prompt only the engine knows

    @property
    def path(self) -> str:
        """Where engines are asked it."""
        return CHAT_PATH if self.is_chat else COMPLETION_PATH

    @property
    def hides_reasoning(self) -> bool:
        """Whether the client wants an answer without its reasoning."""
        return self.body.get("include_reasoning") is False

    def masked_under(self, constrained: bool | None) -> str:
        """Why what is sampled must not be trained on, or nothing; `constrained` is what the engine says of it."""
        return self.masked or (self.doubted if constrained is None else "constrained" if constrained else "")

    def continuable_under(self, constrained: bool | None) -> bool:
        """Whether an answer goes on elsewhere from its tokens; others are shown to a client when they are whole."""
        return self.continuable and not (self.grammar if constrained is None else constrained)

    @property
    def messages(self) -> list[Any]:
        """Of a chat request."""
        return self.body["messages"]

    @property
    def rendering(self) -> Json:
        """Whatever beside the messages changes the prompt."""
        return {key: self.body[key] for key in _RENDERING if self.body.get(key) is not None}


# -- reading a request -----------------------------------------------------------------------------------------------
def _typed(body: Json, key: str, kinds: type | tuple[type, ...], default: Any) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise BadRequest(f"{key} has the wrong type")
    return value


def _number(body: Json, key: str, default: float) -> float:
    return _typed(body, key, (int, float), default)


def _check_stop(body: Json) -> None:
    stop = _typed(body, "stop", (str, list), [])
    if not isinstance(stop, str) and not all(isinstance(s, str) for s in stop):
        raise BadRequest("stop has the wrong type")


def _masked(body: Json, temperature: float) -> str:
    """Why tokens sampled so must not be trained on: the trainer applies the temperature and nothing else."""
    if temperature < _LEAST_TEMPERATURE:
        return "greedy"
    truncated = _number(body, "top_p", 1) < 1 or _number(body, "top_k", 0) > 0 or _number(body, "min_p", 0) > 0
    if truncated:
        return "truncated"
    if any(_number(body, key, 0) for key in _PENALTIES) or _number(body, "repetition_penalty", 1) != 1:
        return "penalties"
    if any(body.get(key) for key in _CONSTRAINTS) or _formatted(body):
        return "constrained"
    return ""


def _doubted(body: Json) -> str:
    """Why such tokens had better not be trained on, where the engine does not say what has a say in them."""
    if _tool_grammar(body):
        return "constrained"
    return "unknown option" if _others(body, _JUDGED) else ""


def _others(body: Json, known: set[str]) -> bool:
    return any(value is not None and key not in known for key, value in body.items())


def _formatted(body: Json) -> bool:
    form = _typed(body, "response_format", dict, {})
    return form.get("type", "text") != "text"


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


def _continuable(body: Json, text_only: bool) -> bool:
    counted = any(_number(body, key, 0) for key in _PENALTIES)  # they count sampled tokens, not the prompt's
    bound = _others(body, _CONTINUABLE) or _formatted(body)  # a grammar would begin anew in the middle
    return not (counted or bound) and text_only and (body.get("n") or 1) == 1


def _text_only(messages: list[Any]) -> bool:
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and not all(
            isinstance(p, str) or (isinstance(p, dict) and "text" in p) for p in parts
        ):
            return False
    return True


def parse(body: Any) -> Request:
    """Check a chat completion request.

    Raises:
        BadRequest: it is not one.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    logprobs, top = _typed(body, "logprobs", bool, False), _typed(body, "top_logprobs", int, 0)
    body = _without_echo(body)
    return _request(body, True, logprobs, top, _text_only(messages))


def parse_completion(body: Any) -> Request:
    """Check a plain completion request; of several prompts only the one in a list of one is taken.

    Raises:
        BadRequest: it is not one, or one whose tokens could not be recorded.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    prompt = _single(body.get("prompt"))
    body = _without_echo(body)
    if body.get("suffix"):
        raise BadRequest("suffix is not supported: the model would see another prompt than the recorded one")
    best_of = _typed(body, "best_of", int, None)
    if best_of not in (None, _typed(body, "n", int, 1)):
        raise BadRequest("best_of must equal n: answers that are thrown away could not be recorded")
    top = _typed(body, "logprobs", int, None)
    body = {key: value for key, value in body.items() if key not in ("suffix", "best_of")}
    return _request({**body, "prompt": prompt}, False, top is not None, top or 0, True)


def _without_echo(body: Json) -> Json:
    """The body without an option that would have the prompt answered as if it had been sampled."""
    if _typed(body, "echo", bool, False):
        raise BadRequest("echo is not supported: the prompt would be answered as if it had been sampled")
    return {key: value for key, value in body.items() if key != "echo"} if "echo" in body else body


def _single(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not ids:
        raise BadRequest("prompt must be one text, or the token ids of one")
    return prompt


def _request(body: Json, is_chat: bool, logprobs: bool, top_logprobs: int, text_only: bool) -> Request:
    choices = _typed(body, "n", int, 1)
    if not 1 <= choices <= MAX_CHOICES:
        raise BadRequest(f"n must be between 1 and {MAX_CHOICES}")
    temperature = _number(body, "temperature", 1.0)
    stream_options = _typed(body, "stream_options", dict, {})
    max_tokens = _typed(body, "max_completion_tokens", int, _typed(body, "max_tokens", int, None))
    if max_tokens is not None and max_tokens < 1:
        raise BadRequest("max_tokens must be at least 1")
    _check_stop(body)
    _typed(body, "vllm_xargs", dict, {})
    _typed(body, "seed", int, 0)
    sampling = {"temperature": temperature, "max_tokens": max_tokens, "n": choices}
    sampling |= {key: body[key] for key in (*_NEUTRAL, *_PENALTIES, "seed", "stop") if body.get(key) is not None}
    return Request(
        body=body,
        is_chat=is_chat,
        model=_typed(body, "model", str, ""),
        stream=_typed(body, "stream", bool, False),
        include_usage=bool(stream_options.get("include_usage")),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        token_ids=_typed(body, "return_token_ids", bool, False),
        choices=choices,
        sampling=sampling,
        masked=_masked(body, temperature),
        doubted=_doubted(body),
        continuable=_continuable(body, text_only),
        grammar=_tool_grammar(body),
        text_only=text_only,
    )


# -- asking an engine ------------------------------------------------------------------------------------------------
@dataclass
class Progress:
    """What a request has become so far, for the engine that is asked next."""

    messages: list[Any] | None = None  # in place of the client's, where more is known of them
    history: History | None = None  # the known conversation that they repeat
    prompt: array[int] | None = None  # ids, once an engine has said them
    kept: array[int] = field(default_factory=lambda: array("i"))  # sampled so far
    handoff: Json | None = None  # where the keys and values of what came before were left


def leg(request: Request, progress: Progress) -> Json:
    """The body of a request to an engine: the client's, as a token stream, with nothing left to defaults."""
    body = {key: value for key, value in request.body.items() if value is not None and key not in _KEPT_BACK}
    for key, value in _NEUTRAL.items():
        body.setdefault(key, value)
    # Without its reasoning an engine would keep the tokens of an answer to itself; what is not asked for is not shown.
    body |= {"temperature": request.sampling["temperature"], "stream": True, "return_token_ids": True}
    if request.is_chat:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    else:
        body["logprobs"] = request.top_logprobs
    if progress.messages is not None:
        body["messages"] = progress.messages
    if (seed := body.get("seed")) is not None and progress.kept:
        # The same seed would repeat the random numbers that the first tokens were drawn with.
        body["seed"] = (seed + 0x9E3779B97F4A7C15 * len(progress.kept)) % (1 << 62)
    extra = {key: value for key, value in body.pop("vllm_xargs", {}).items() if key != ARGUMENT}
    if progress.prompt is not None:
        extra[ARGUMENT] = Extension(prompt=progress.prompt, kept=progress.kept).encode()
    elif progress.history is not None:
        extra[ARGUMENT] = Extension(history=progress.history).encode()
    if extra:
        body["vllm_xargs"] = extra
    if progress.handoff is not None:
        body["kv_transfer_params"] = {ARGUMENT: progress.handoff}
    return body
