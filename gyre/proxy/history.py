"""What a proxy knows of an execution's conversations. Pure.

A client repeats a conversation in every request, as text and in its own formatting. This module recognises it: messages
have a canonical form (`canonical`), whose hashes are chained, and every answered call is a node under the chain of its
messages and its answer. Of a new request, every known answer is put back as the engine gave it, and the ids of the
deepest one are the history that the engine is told (`gyre.splice`). A message that really changed leads to no node.

Conversations side by side are chains of their own, also where they begin alike. A node holds only the ids that it adds
to an earlier one, its base. Memory is bounded: nodes that were not used for longest go first, and never before a node
that builds on them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from gyre.proxy.encoding import encode
from gyre.splice import History as Known

Json = dict[str, Any]

#: Bounds of one execution's knowledge: answered calls, and token ids (4 bytes each; text is about as much again). A
#: single conversation that is longer is re-encoded from there on.
MAX_NODES, MAX_IDS = 4096, 1 << 19
#: Recent calls that a prompt without a known history is compared with.
_RECENT = 4


class Place(NamedTuple):
    """Where a call was answered: engine, role epoch, policy version, and where its keys and values can be had."""

    engine: int
    epoch: int
    policy: int
    kv: str


@dataclass(eq=False, slots=True)
class Node:
    """An answered call: its prompt and answer are the first `shared` ids of `base`, and `tail`."""

    call: int  # its number in the record
    serial: int
    base: Node | None
    shared: int
    tail: array[int]
    answer: int  # ids at the end that were sampled
    rendered: tuple[int, str]  # length and digest of what the chat template gave
    message: Json  # as the engine gave it
    place: Place | None
    asked: bytes = b""  # chain of the messages that it answers; empty where there are none
    step: bytes = b""  # the same with its answer

    @property
    def length(self) -> int:
        """Ids of prompt and answer."""
        return self.shared + len(self.tail)

    @property
    def reasoning(self) -> str:
        """Of its answer."""
        return _reasoning(self.message) or ""

    def sequence(self) -> array[int]:
        """The ids of prompt and answer."""
        parts, node, end = [], self, self.length
        while node is not None and end > 0:
            if end > node.shared:
                parts.append(node.tail[: end - node.shared])
            node, end = node.base, min(end, node.shared)
        whole = array("i")
        for part in reversed(parts):
            whole.extend(part)
        return whole


@dataclass
class Found:
    """What is known of a request's messages."""

    asked: bytes  # their chain
    node: Node | None = None  # the last answer among them that is known
    messages: list[Any] | None = None  # with known answers as they were given; None where nothing is known
    changed: bool = False  # an answer that was given has been changed

    def known(self, sequence: array[int]) -> Known | None:
        """What to tell an engine; `sequence` is the node's."""
        if self.node is None:
            return None
        content = self.node.message.get("content")
        texts = tuple(t.strip() for t in (self.node.reasoning, content) if isinstance(t, str) and t.strip())
        return Known(sequence, self.node.answer, self.node.rendered, texts)


@dataclass
class History:
    """All that is known of one execution."""

    max_nodes: int = MAX_NODES
    max_ids: int = MAX_IDS
    ids: int = 0  # held now
    _nodes: OrderedDict[int, Node] = field(default_factory=OrderedDict)  # by serial; used last comes last
    _steps: dict[bytes, dict[str, Node]] = field(default_factory=dict)  # by chain, then by reasoning; newest last
    _asked: dict[bytes, int] = field(default_factory=dict)  # nodes by the chain they answer
    _recent: deque[Node] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _serial: int = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, rendering: Json, messages: list[Any]) -> Found:
        """Recognise the messages of a request; `rendering` has the options that change what they are rendered to."""
        chain = _hash(b"", encode(rendering, ordered=True))
        known: dict[int, Node] = {}
        changed = False
        for index, message in enumerate(messages):
            before, chain = chain, _hash(chain, canonical(message))
            if not isinstance(message, dict) or message.get("role") != "assistant":
                continue
            reasoning = _reasoning(message)
            if (node := self._match(chain, reasoning)) is not None:
                known[index], reasoning = node, node.reasoning
            else:
                changed = changed or before in self._asked
            chain = _after(chain, reasoning)
        if not known:
            return Found(chain, changed=changed)
        self._touch(known.values())
        return Found(chain, known[max(known)], _restored(messages, known), changed)

    def _match(self, step: bytes, reasoning: str | None) -> Node | None:
        """The node of an answer; where the client dropped the reasoning, the newest one of this content."""
        alike = self._steps.get(step)
        if not alike:
            return None
        if reasoning is None:
            return next(reversed(alike.values()))
        return next((node for text, node in alike.items() if text.strip() == reasoning.strip()), None)

    def nearest(self, prompt: array[int], node: Node | None = None) -> tuple[Node | None, int]:
        """A node whose ids the prompt begins with, as far as the number says: `node`, or the best of recent ones."""
        best, shared = None, 0
        candidates = [node] if node is not None else []
        candidates += [recent for recent in reversed(self._recent) if recent.serial in self._nodes]
        for candidate in candidates:
            length = shared_length(candidate.sequence(), prompt)
            if length > shared:
                best, shared = candidate, length
            if length == len(prompt) or (candidate is node and length == candidate.length):
                break
        return best, shared

    def add(
        self,
        call: int,
        ids: array[int],
        answer: int,
        near: tuple[Node | None, int] = (None, 0),
        place: Place | None = None,
        asked: bytes = b"",
        message: Json | None = None,
        rendered: tuple[int, str] = (0, ""),
    ) -> Node:
        """Remember call number `call`: `ids` are its prompt and, at their end, the `answer` ids that were sampled.

        `near` is what `nearest` said of the prompt. Without `message` (an answer that no client got whole) it only
        serves as a base.
        """
        base, shared = near
        while base is not None and base.base is not None and shared <= base.shared:
            base = base.base  # which has them as well, and fewer steps away
        message = message or {}
        self._serial += 1
        node = Node(call, self._serial, base, shared, ids[shared:], answer, rendered, message, place, asked)
        if asked:
            node.step = _hash(asked, canonical({"role": "assistant", **message}))
            alike = self._steps.setdefault(node.step, {})
            alike.pop(node.reasoning, None)
            alike[node.reasoning] = node
            self._asked[asked] = self._asked.get(asked, 0) + 1
        self._nodes[node.serial] = node
        self._recent.append(node)
        self.ids += len(node.tail)
        self._touch([node])
        while len(self._nodes) > self.max_nodes or self.ids > self.max_ids:
            self._forget(next(iter(self._nodes.values())))
        return node

    def _touch(self, nodes: Iterable[Node]) -> None:
        """Count nodes and all their bases as used; a base always as used after what builds on it."""
        used: dict[int, Node] = {}
        for node in nodes:
            one: Node | None = node
            while one is not None and one.serial not in used:
                used[one.serial] = one
                one = one.base
        for serial in sorted(used, reverse=True):
            if serial in self._nodes:
                self._nodes.move_to_end(serial)

    def _forget(self, node: Node) -> None:
        del self._nodes[node.serial]
        self.ids -= len(node.tail)
        if not node.asked:
            return
        alike = self._steps.get(node.step, {})
        if alike.get(node.reasoning) is node:  # it may be another by now: the same answer, given again
            del alike[node.reasoning]
            if not alike:
                del self._steps[node.step]
        self._asked[node.asked] -= 1
        if not self._asked[node.asked]:
            del self._asked[node.asked]


def shared_length(a: array[int], b: array[int]) -> int:
    """Number of leading elements that two arrays share."""
    left, right, size = a.tobytes(), b.tobytes(), a.itemsize
    low, high = 0, min(len(a), len(b))
    if left[: high * size] == right[: high * size]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if left[low * size : middle * size] == right[low * size : middle * size]:
            low = middle
        else:
            high = middle
    return low


# -- the canonical form ----------------------------------------------------------------------------------------------
def canonical(message: Any) -> bytes:
    """What of a message makes it the same one, however a client formats it; reasoning and ids aside."""
    if not isinstance(message, dict):
        return encode(message, ordered=True)
    text, media = _content(message.get("content"))
    calls = message.get("tool_calls")
    calls = [_call(call) for call in calls] if isinstance(calls, list) else calls or []
    if legacy := message.get("function_call"):
        calls = [*calls, _call({"function": legacy})]
    return encode([message.get("role"), message.get("name"), text, media, calls], ordered=True)


def _content(content: Any) -> tuple[str, list[str]]:
    """Its text, and digests of whatever else it has."""
    if content is None or isinstance(content, str):
        return (content or "").strip(), []
    texts, media = [], []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            media.append(hashlib.blake2b(encode(part, ordered=True), digest_size=16).hexdigest())
    return "\n".join(texts).strip(), media


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return [function.get("name"), _arguments(function.get("arguments"))] if isinstance(function, dict) else call


def _arguments(value: Any) -> Any:
    """Arguments of a call as a value; text that is not JSON stays text."""
    try:
        return _numbers(msgspec.json.decode(value.strip() or "{}") if isinstance(value, str) else value or {})
    except (ValueError, RecursionError):
        return value.strip() if isinstance(value, str) else None


def _numbers(value: Any) -> Any:
    """Whole numbers as such: clients written in other languages do not tell 1.0 from 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def _reasoning(message: Json) -> str | None:
    """The reasoning of an answer, where it has any."""
    given = message.get("reasoning") or message.get("reasoning_content")
    return given if isinstance(given, str) else None


def _hash(chain: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=chain).digest()


def _after(step: bytes, reasoning: str | None) -> bytes:
    """The chain after an answer, which is another one for each reasoning."""
    return _hash(step, (reasoning or "").strip().encode("utf-8", "surrogatepass"))


# -- putting answers back --------------------------------------------------------------------------------------------
def _restored(messages: list[Any], known: dict[int, Node]) -> list[Any]:
    """The messages with known answers as they were given, and the ids of their calls in the results that follow."""
    restored: list[Any] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        if index in known:
            given, recorded = message.get("tool_calls") or [], known[index].message.get("tool_calls") or []
            for call, original in zip(given, recorded, strict=False):
                if isinstance(call.get("id"), str) and original.get("id"):
                    names[call["id"]] = original["id"]
            message = {"role": "assistant", "content": None, **known[index].message}
        elif names and isinstance(message, dict) and isinstance(name := message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": names.get(name, name)}
        restored.append(message)
    return restored
