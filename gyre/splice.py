"""What a proxy tells an engine about a prompt's tokens, and how known tokens replace re-encoded ones. Pure.

An engine renders messages to token ids. Encoding the text of an answer anew need not give the ids that were sampled,
and then the model would be trained on a conversation that it never saw. So a proxy that knows the conversation sends
its ids along (`History`), and the engine puts them where the rendering repeats it (`splice`). The same extension of a
request carries what a request has already become on other engines (`Extension.prompt`, `Extension.kept`), and the
engine says in a header what came of it (`PromptNote`).

On the wire an extension is a JSON text, its arrays base64 of little-endian int32.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Name of the extension among a request's extra arguments (``vllm_xargs``), and of the header of its answer.
ARGUMENT = "gyre"
HEADER = "x-gyre-prompt"

Decode = Callable[[list[int]], str]

#: Tokens at the end of a generation prompt that an encoder may merge with the text after them.
_MERGED = 4


def little(values: array[Any]) -> bytes:
    """An array's little-endian bytes."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def from_little(kind: str, data: bytes) -> array[Any]:
    """The array of `little`; `kind` is its type code. Raises ValueError where the bytes are no whole numbers."""
    values = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _ids(ids: Sequence[int]) -> array[int]:
    return ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)


def digest(ids: Sequence[int]) -> str:
    """32 hexadecimal digits that identify a sequence of token ids."""
    return hashlib.blake2b(little(_ids(ids)), digest_size=16).hexdigest()


def pack(ids: Sequence[int]) -> str:
    """Token ids as text for JSON."""
    return base64.b64encode(little(_ids(ids))).decode()


def unpack(text: Any) -> array[int]:
    """The ids of `pack`. Raises ValueError where it is not such a text, or an id is negative."""
    if not isinstance(text, str):
        raise ValueError("token ids must be base64 text")
    data = base64.b64decode(text, validate=True)
    if len(data) % 4:
        raise ValueError("token ids must be whole 32-bit numbers")
    ids = from_little("i", data)
    if ids and min(ids) < 0:
        raise ValueError("token ids must not be negative")
    return ids


def _object(text: str, known: set[str]) -> dict[str, Any]:
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except RecursionError:
        raise ValueError("must not be nested so deeply") from None
    if not isinstance(value, dict) or not set(value) <= known:
        raise ValueError(f"must be a JSON object of {', '.join(sorted(known))}")
    return value


def _rendered(value: Any) -> tuple[int, str]:
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int or value[0] < 0:
        raise ValueError("rendered must be a length and a digest")
    if not isinstance(value[1], str):
        raise ValueError("rendered must be a length and a digest")
    return value[0], value[1]


@dataclass(frozen=True)
class History:
    """A known conversation: the ids of an earlier call's prompt and of its answer."""

    sequence: array[int]
    answer: int  # ids at the end of `sequence` that were sampled
    rendered: tuple[int, str]  # length and digest of what the chat template gave for that call's prompt
    texts: tuple[str, ...] = ()  # what the rendered answer must contain, in this order: its reasoning, its content

    def _encode(self) -> dict[str, Any]:
        known = {"sequence": pack(self.sequence), "answer": self.answer, "rendered": list(self.rendered)}
        return {**known, "texts": list(self.texts)}

    @staticmethod
    def _decode(value: Any) -> History:
        if not isinstance(value, dict) or not set(value) <= {"sequence", "answer", "rendered", "texts"}:
            raise ValueError("history must have sequence, answer, rendered and texts")
        sequence, answer, texts = unpack(value.get("sequence")), value.get("answer"), value.get("texts", [])
        if type(answer) is not int or not 0 <= answer <= len(sequence):
            raise ValueError("answer must be a number of ids at the end of sequence")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("texts must be a list of texts")
        return History(sequence, answer, _rendered(value.get("rendered")), tuple(texts))


@dataclass(frozen=True)
class Extension:
    """What a proxy adds to a request."""

    prompt: array[int] | None = None  # exactly these ids, whatever the messages are rendered to
    kept: array[int] = field(default_factory=lambda: array("i"))  # ids that were sampled for this very request
    history: History | None = None

    def encode(self) -> str:
        """The extension as JSON text."""
        value: dict[str, Any] = {}
        if self.prompt is not None:
            value["prompt"] = pack(self.prompt)
        if self.kept:
            value["kept"] = pack(self.kept)
        if self.history is not None:
            value["history"] = self.history._encode()
        return json.dumps(value, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> Extension:
        """The extension of a JSON text. Raises ValueError where it is not one."""
        value = _object(text, {"prompt", "kept", "history"})
        return Extension(
            prompt=unpack(value["prompt"]) if "prompt" in value else None,
            kept=unpack(value.get("kept", "")),
            history=History._decode(value["history"]) if "history" in value else None,
        )


@dataclass(frozen=True)
class PromptNote:
    """What an engine says of the prompt that it used, and of how it samples what follows."""

    rendered: tuple[int, str]  # length and digest of what the messages were rendered to
    spliced: bool  # known ids were used, not the rendering
    drift: int  # ids that encoding anew would have given otherwise
    constrained: bool | None = None  # a grammar or the like has a say, beside what the request asks for; None: not said

    def encode(self) -> str:
        """The note as JSON text, the header's value."""
        value = {"rendered": list(self.rendered), "spliced": self.spliced, "drift": self.drift}
        if self.constrained is not None:
            value["constrained"] = self.constrained
        return json.dumps(value, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> PromptNote:
        """The note of a header's value. Raises ValueError where it is not one."""
        value = _object(text, {"rendered", "spliced", "drift", "constrained"})
        spliced, drift, constrained = value.get("spliced"), value.get("drift"), value.get("constrained")
        if not isinstance(spliced, bool) or type(drift) is not int or drift < 0:
            raise ValueError("spliced must be true or false, and drift a number")
        if not isinstance(constrained, bool | None):
            raise ValueError("constrained must be true or false")
        return PromptNote(_rendered(value.get("rendered")), spliced, drift, constrained)


def splice(rendered: Sequence[int], history: History, ends: Container[int], decode: Decode) -> array[int] | None:
    """`rendered` with the known ids in place of those that the chat template and the encoder made of the same text.

    `ends` has the ids that end a turn; `decode` gives the text of ids, special tokens included. None where the
    rendering does not repeat the history: another beginning, or an answer that lacks one of `history.texts`.
    """
    found = _begins(rendered, history, decode)
    if found is None:
        return None
    start, lead = found
    known = history.sequence
    rest = list(rendered[start:])
    sampled = known[len(known) - history.answer :]
    ended = bool(sampled) and sampled[-1] in ends
    end = next((index for index, token in enumerate(rest) if token in ends), None)
    said = decode(list(sampled[:-1] if ended else sampled))
    exact = _boundary(rest, lead + said, decode)
    if end is None or (exact is not None and exact < end and decode(rest[exact:end]).strip()):
        # No token ends the answer in this template (what ends here is a later turn): only the text itself can tell.
        return None if exact is None else known + array("i", rest[exact:])
    text = decode(rest[:end])
    if not text.startswith(lead) or not _contains(text[len(lead) :], history.texts, said):
        return None
    return known + array("i", rest[end + 1 if ended else end :])


def _begins(rendered: Sequence[int], history: History, decode: Decode) -> tuple[int, str] | None:
    """Where the answer begins in a rendering: index of a token, and the text of it that still belongs to the prompt.

    The last tokens of the earlier prompt may be merged with the first ones of the answer, which then begins within a
    token. What these last tokens were is known from `history`, since a rendering's end is never replaced.
    """
    length, expected = history.rendered
    if len(rendered) >= length and digest(rendered[:length]) == expected:
        return length, ""
    prompt = history.sequence[: len(history.sequence) - history.answer]
    for merged in range(1, 1 + min(_MERGED, length, len(prompt))):
        tail = prompt[len(prompt) - merged :]
        start = length - merged
        if start < len(rendered) and digest(array("i", rendered[:start]) + tail) == expected:
            return start, decode(list(tail))
    return None


def _boundary(ids: list[int], text: str, decode: Decode) -> int | None:
    """The number of ids whose text is exactly `text`."""
    if not text:
        return 0
    most = min(len(ids), 4 * len(text))  # no character is more than four bytes, and no id less than one
    near = bisect_left(range(most + 1), len(text), key=lambda count: len(decode(ids[:count])))
    for count in range(max(0, near - _MERGED), min(len(ids), near + _MERGED) + 1):  # parts of characters count as some
        if decode(ids[:count]) == text:
            return count
    return None


def _contains(text: str, parts: Sequence[str], said: str) -> bool:
    """Whether `text` has all parts, one after the other, and none behind more than what it came behind when `said`.

    Templates may strip parts, and write white space otherwise. What comes behind more is something else that has the
    same words: those of a short reasoning that was dropped may well be found in the arguments of a call.
    """
    at = before = 0
    for part in parts:
        part = part.strip()
        if (found := text.find(part, at)) < 0:
            return False
        if (original := said.find(part, before)) >= 0:
            if _solid(text[at:found]) > _solid(said[before:original]):
                return False
            before = original + len(part)
        at = found + len(part)
    return True


def _solid(text: str) -> int:
    """Characters but for white space."""
    return len("".join(text.split()))


def resolve(
    rendered: Sequence[int], extension: Extension, ends: Container[int], decode: Decode
) -> tuple[array[int], PromptNote]:
    """The prompt to use, and what to say of it."""
    ids = _ids(rendered)
    prompt = extension.prompt
    if prompt is None and extension.history is not None:
        prompt = splice(ids, extension.history, ends, decode)
    note = PromptNote((len(ids), digest(ids)), prompt is not None, 0 if prompt is None else drift(ids, prompt, ends))
    return ids if prompt is None else prompt, note


def drift(rendered: Sequence[int], prompt: Sequence[int], ends: Container[int]) -> int:
    """How many ids differ, turn by turn: in each, those between what both have at its beginning and at its end."""
    if rendered == prompt:
        return 0
    first, second = list(_turns(rendered, ends)), list(_turns(prompt, ends))
    if len(first) != len(second):
        return _differing(rendered, prompt)
    return sum(_differing(one, other) for one, other in zip(first, second, strict=True) if one != other)


def _turns(ids: Sequence[int], ends: Container[int]) -> Iterator[Sequence[int]]:
    start = 0
    for index, token in enumerate(ids):
        if token in ends:
            yield ids[start : index + 1]
            start = index + 1
    yield ids[start:]


def _differing(one: Sequence[int], other: Sequence[int]) -> int:
    shorter = min(len(one), len(other))
    same = next((n for n in range(shorter) if one[n] != other[n]), shorter)
    left = shorter - same
    return max(len(one), len(other)) - same - next((n for n in range(left) if one[-1 - n] != other[-1 - n]), left)
