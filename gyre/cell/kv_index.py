"""What a KV block is worth: the tokens it stands for, as a chain of hashes that every engine computes alike. Pure.

A block's key is a hash of the key of the block before it and of its own tokens, so one key stands for a whole prefix.
The last block of a request is usually not full; its key is of the tokens that it has. A `Ledger` knows which key each
block of an engine's cache holds at this moment: an entry is made when a block's tokens are all computed, and ends when
the block is given to somebody else, whatever vLLM's own prefix cache knows of it.

What the ledger keeps true: a block whose entry says key k holds, in its first `count` positions, the keys and values of
exactly the tokens that k was computed from. `plan` chooses what is moved, so that every block comes with all that
precede it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
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
    """What a block holds: `count` tokens, whose prefix is `key`, behind the prefix `parent`."""

    key: bytes
    parent: bytes
    count: int


@dataclass(frozen=True)
class Chosen:
    """A block to be moved; `leaf`: no other block of the plan is behind it, so whoever takes it has the whole prefix."""

    key: bytes
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
        chosen: dict[bytes, int] = {}
        inner: set[bytes] = set()
        for entry in reversed(self._entries.values()):
            for block, member in self._path(entry, by_key, chosen):
                if len(chosen) >= limit:
                    break
                chosen[member.key] = block
                inner.add(member.parent)
            if len(chosen) >= limit:
                break
        return [Chosen(each, block, each not in inner) for each, block in chosen.items()]

    @staticmethod
    def _path(
        entry: Entry, by_key: Mapping[bytes, tuple[int, Entry]], chosen: Mapping[bytes, int]
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
    """The blocks of a prefix that were found: their slots in order, and the tokens they hold."""

    slots: tuple[int, ...]
    tokens: int


def match(index: Mapping[bytes, int], tokens: Sequence[int], size: int) -> Match:
    """The longest prefix of `tokens` whose blocks of `size` tokens are all in `index`, which maps keys to slots.

    Its last block may be one that is not full.
    """
    slots: list[int] = []
    parent, found = ROOT, 0
    while found + size <= len(tokens):
        this = key(parent, tokens[found : found + size])
        if (slot := index.get(this)) is None:
            break
        slots.append(slot)
        parent, found = this, found + size
    for count in range(min(size - 1, len(tokens) - found), 0, -1):
        if (slot := index.get(key(parent, tokens[found : found + count]))) is not None:
            return Match((*slots, slot), found + count)
    return Match(tuple(slots), found)
