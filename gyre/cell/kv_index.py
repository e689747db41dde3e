"""What a KV block is worth: the tokens it stands for, as a chain of hashes that every engine computes alike. Pure.

A block's key is a hash of the key of the block before it and of its own tokens, so one key stands for a whole prefix.
The last block of a request is usually not full; its key is of the tokens that it has. An `Index` has the tokens too, so
that a block serves a request of which it holds only some: of what was sampled, not all has reached the client. A
`Ledger` knows what each block of an engine's cache holds at this moment: an entry is made when a block's tokens are all
computed, and ends when the block is given to somebody else, whatever vLLM's own prefix cache knows of it.

What the ledger keeps true: a block whose entry says key k holds, in its first positions, the keys and values of
exactly the tokens that k was computed from. `plan` chooses what is moved, so that every block comes with all that
precede it.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

KEY_BYTES = 16
#: What precedes a first block.
ROOT = b"\0" * KEY_BYTES


def key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that holds `tokens` (not more than a block's) behind the prefix `parent`."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def extend(chain: list[bytes], tokens: Sequence[int], size: int, count: int) -> None:
    """Bring `chain`, the keys of the full blocks of `size` tokens, up to the first `count` tokens."""
    for block in range(len(chain), count // size):
        parent = chain[-1] if chain else ROOT
        chain.append(key(parent, tokens[block * size : (block + 1) * size]))


@dataclass(frozen=True)
class Entry:
    """What a block holds: `tokens`, behind the prefix `parent`; `key` stands for all of it."""

    key: bytes
    parent: bytes
    tokens: array[int]

    @classmethod
    def of(cls, parent: bytes, tokens: Sequence[int]) -> Entry:
        """The entry of a block behind a prefix."""
        return cls(key(parent, tokens), parent, array("i", tokens))


@dataclass(frozen=True)
class Chosen:
    """A block to be moved; `leaf`: no other one is behind it, so whoever takes it has the whole prefix."""

    entry: Entry
    block: int
    leaf: bool


class Ledger:
    """Entries of an engine's blocks, the most recently written or used last."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, block: int) -> Entry | None:
        """The entry of a block."""
        return self._entries.get(block)

    def hold(self, block: int, entry: Entry) -> None:
        """A block holds this now, or is used again."""
        self._entries.pop(block, None)
        self._entries[block] = entry

    def drop(self, blocks: Iterable[int]) -> None:
        """These blocks are given away: what they held is overwritten."""
        for block in blocks:
            self._entries.pop(block, None)

    def clear(self) -> None:
        """Nothing holds anything."""
        self._entries.clear()

    def plan(self, limit: int) -> list[Chosen]:
        """At most `limit` blocks to move: the most recent prefixes, each whole or, the last one, as far as it fits.

        A prefix of which a block is missing is of no use from there on, and is left out.
        """
        by_key = {entry.key: (block, entry) for block, entry in self._entries.items()}
        chosen: dict[bytes, tuple[int, Entry]] = {}
        inner: set[bytes] = set()
        for entry in reversed(self._entries.values()):
            for block, member in self._path(entry, by_key, chosen):
                if len(chosen) >= limit:
                    break
                chosen[member.key] = (block, member)
                inner.add(member.parent)
            if len(chosen) >= limit:
                break
        return [Chosen(entry, block, entry.key not in inner) for block, entry in chosen.values()]

    @staticmethod
    def _path(
        entry: Entry, by_key: Mapping[bytes, tuple[int, Entry]], chosen: Container[bytes]
    ) -> list[tuple[int, Entry]]:
        """The blocks from the first that is not chosen yet to `entry`, or none where one of them is missing."""
        path: list[tuple[int, Entry]] = []
        at = entry.key
        while at != ROOT and at not in chosen:
            if at not in by_key:
                return []
            path.append(by_key[at])
            at = path[-1][1].parent
        return path[::-1]


@dataclass(frozen=True)
class Match:
    """The blocks of a prefix that were found: their slots in order, and the tokens they hold of it."""

    slots: tuple[int, ...]
    tokens: int


class Index:
    """Blocks by what they hold, slot by slot; `size` is the tokens of a full one."""

    def __init__(self, entries: Sequence[Entry], size: int) -> None:
        self._entries = entries
        self._size = size
        self._by_key = {entry.key: slot for slot, entry in enumerate(entries)}
        self._behind: dict[bytes, list[int]] = {}
        for slot, entry in enumerate(entries):
            self._behind.setdefault(entry.parent, []).append(slot)

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest prefix of `tokens` that blocks hold; of the last of them perhaps only the first tokens."""
        slots: list[int] = []
        parent, found = ROOT, 0
        while found + self._size <= len(tokens):
            this = key(parent, tokens[found : found + self._size])
            if (slot := self._by_key.get(this)) is None:
                break
            slots.append(slot)
            parent, found = this, found + self._size
        rest = tokens[found : found + self._size]
        common = {slot: _common(self._entries[slot].tokens, rest) for slot in self._behind.get(parent, ())}
        last = max(common, key=lambda slot: common[slot], default=None)
        if last is None or not common[last]:
            return Match(tuple(slots), found)
        return Match((*slots, last), found + common[last])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
