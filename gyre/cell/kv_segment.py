"""Memory in which an engine leaves KV blocks for other engines: its page, which says what there is, and the shards.

All of it is memory without a name (memfd), which other processes of the same user open as ``/proc/<pid>/fd/<n>``: it is
gone when the engine's process is, however that ended, and nothing can be left behind. A page lives as long as its
engine. A shard holds the blocks of one worker of the engine, with an index from keys (`gyre.cell.kv_index`) to slots.

What it keeps true: one writer, the engine's own process, owns the page, and `generation` there and in a shard's header
is that of the blocks that may be read. It is taken away (set to -1) before blocks are given up, and memory that
was readable is never written again, so a reader that finds the generation it expects before and after its copy has
copied what was exported. What a shard is known by is its tag, random bytes of its own: a path is only as good as the
descriptor behind it, which may be another shard's by the time that somebody opens it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import psutil

from gyre.cell.kv_index import KEY_BYTES, Chosen, Entry, Index
from gyre.errors import GyreError

PAGE_BYTES = 4096
ALIGNMENT = 4096
#: Shards of one engine: its workers.
MOST_SHARDS = 64

_PAGE = struct.Struct("<8s16sqqqqqqq")  # magic, tag, stage, turn, epoch, policy, generation, plan, shards
_FDS = struct.Struct(f"<{MOST_SHARDS}q")
# magic, generation, policy, model, layout, tag, block bytes, tokens, slots, data
_SHARD = struct.Struct("<8sqq16s16s16sqqqq")
_PLAN = struct.Struct("<8s16s16sqq")  # magic, tag, model, tokens of a block, blocks
_PAGE_MAGIC, _SHARD_MAGIC, _PLAN_MAGIC = b"gyrekvp1", b"gyrekvs2", b"gyrekvi2"
_GENERATION_AT = 8  # in a shard


def fresh_tag() -> bytes:
    """A tag that no other shard has."""
    return secrets.token_bytes(16)


class Unavailable(GyreError):
    """Blocks that are not there, or are not those that are wanted: whoever wanted them computes."""


class Stage(IntEnum):
    """What an engine does with its KV blocks."""

    STARTED = 0
    SERVING = 1
    PINNING = 2  # its gate is closing: the blocks of requests that end are kept
    EXPORTING = 3
    READY = 4  # the shards may be read
    GONE = 5  # they were given up
    HELD = 6  # its weights are being changed


@dataclass(frozen=True)
class Page:
    """What a page says; `generation` is that of the shards, `fds` are theirs, `plan` that of a plan to be written."""

    tag: bytes
    stage: Stage
    turn: int = 0  # raised whenever the gate opens: what the cache held before is of no use after
    epoch: int = -1
    policy: int = -1
    generation: int = -1
    plan: int = -1
    fds: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """The bytes of a page."""
        head = _PAGE.pack(
            _PAGE_MAGIC,
            self.tag,
            self.stage,
            self.turn,
            self.epoch,
            self.policy,
            self.generation,
            self.plan,
            len(self.fds),
        )
        return head + _FDS.pack(*self.fds, *[-1] * (MOST_SHARDS - len(self.fds)))

    @classmethod
    def unpack(cls, data: bytes | memoryview | mmap.mmap) -> Page:
        """The page of its bytes.

        Raises:
            Unavailable: these bytes are no page.
        """
        if len(data) < _PAGE.size + _FDS.size:
            raise Unavailable("no page: too short")
        magic, tag, stage, turn, epoch, policy, generation, plan, shards = _PAGE.unpack_from(data)
        if magic != _PAGE_MAGIC or not 0 <= shards <= MOST_SHARDS or stage not in set(Stage):
            raise Unavailable("no page of an engine")
        fds = _FDS.unpack_from(data, _PAGE.size)[:shards]
        return cls(tag, Stage(stage), turn, epoch, policy, generation, plan, fds)


@dataclass(frozen=True)
class Header:
    """What a shard says of itself; `data` is where its first block begins, and a block has `block_bytes`."""

    generation: int
    policy: int
    model: bytes
    layout: bytes
    tag: bytes  # of the export, or of the copy that was fetched of it
    block_bytes: int
    tokens: int  # of a block
    slots: int
    data: int

    def pack(self) -> bytes:
        """The bytes of a header."""
        sizes = (self.block_bytes, self.tokens, self.slots, self.data)
        return _SHARD.pack(_SHARD_MAGIC, self.generation, self.policy, self.model, self.layout, self.tag, *sizes)

    @classmethod
    def unpack(cls, data: bytes | memoryview | mmap.mmap) -> Header:
        """The header of a shard's bytes.

        Raises:
            Unavailable: these bytes are no shard's.
        """
        if len(data) < _SHARD.size:
            raise Unavailable("no shard: too short")
        magic, *rest = _SHARD.unpack_from(data)
        header = cls(*rest)
        if magic != _SHARD_MAGIC or min(header.block_bytes, header.tokens) < 1 or header.slots < 0:
            raise Unavailable("no shard of KV blocks")
        if header.data != data_offset(header.slots, header.tokens):
            raise Unavailable("a shard whose index does not fit its header")
        return header

    @property
    def size(self) -> int:
        """Bytes of the whole shard."""
        return self.data + self.slots * self.block_bytes

    @property
    def taken_at(self) -> int:
        """Where the bytes begin in which readers note what they have taken, one a slot."""
        return INDEX_AT + entries_bytes(self.slots, self.tokens)


def entries_bytes(count: int, tokens: int) -> int:
    """Bytes of `count` packed entries of blocks of `tokens` tokens."""
    return count * (2 * KEY_BYTES + 4 + 4 * tokens)


def data_offset(slots: int, tokens: int) -> int:
    """Where the blocks of a shard begin: behind its header, an entry a slot and a byte a slot."""
    return -(-(INDEX_AT + entries_bytes(slots, tokens) + slots) // ALIGNMENT) * ALIGNMENT


INDEX_AT = _SHARD.size


def pack_entries(entries: Sequence[Entry], tokens: int) -> bytes:
    """The bytes of entries: all keys, all parents, all counts, all tokens."""
    counts = array("i", [len(entry.tokens) for entry in entries]).tobytes()
    held = b"".join(entry.tokens.tobytes().ljust(4 * tokens, b"\0") for entry in entries)
    return b"".join([*(entry.key for entry in entries), *(entry.parent for entry in entries), counts, held])


def unpack_entries(data: bytes, count: int, tokens: int) -> list[Entry]:
    """The entries of their bytes.

    Raises:
        Unavailable: these are not the bytes of so many.
    """
    if len(data) != entries_bytes(count, tokens):
        raise Unavailable("an index of another length than it says")
    keys, parents, counts, held = 0, count * KEY_BYTES, 2 * count * KEY_BYTES, count * (2 * KEY_BYTES + 4)
    entries = []
    for number, length in enumerate(struct.unpack_from(f"<{count}i", data, counts)):
        if not 0 < length <= tokens:
            raise Unavailable("an index with blocks of impossible lengths")
        key, parent = (data[at + number * KEY_BYTES : at + (number + 1) * KEY_BYTES] for at in (keys, parents))
        at = held + number * 4 * tokens
        entries.append(Entry(key, parent, array("i", data[at : at + 4 * length])))
    return entries


def read_index(data: bytes | memoryview | mmap.mmap, header: Header) -> Index:
    """The index of a shard's bytes.

    Raises:
        Unavailable: it is not whole.
    """
    return Index(unpack_entries(bytes(data[INDEX_AT : header.taken_at]), header.slots, header.tokens), header.tokens)


# -- plans -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """Which blocks an engine's workers are to export, slot by slot, and of what model in blocks of how many tokens.

    `tag` is that of the shards which come of it.
    """

    model: bytes
    tokens: int
    chosen: Sequence[Chosen]
    tag: bytes = field(default_factory=fresh_tag)

    def pack(self) -> bytes:
        """The bytes of a plan."""
        head = _PLAN.pack(_PLAN_MAGIC, self.tag, self.model, self.tokens, len(self.chosen))
        blocks = array("q", [each.block for each in self.chosen]).tobytes()
        leaves = bytes(each.leaf for each in self.chosen)
        return head + pack_entries([each.entry for each in self.chosen], self.tokens) + blocks + leaves

    @classmethod
    def unpack(cls, data: bytes) -> Plan:
        """The plan of its bytes.

        Raises:
            Unavailable: these bytes are no plan.
        """
        if len(data) < _PLAN.size:
            raise Unavailable("no plan was written")
        magic, tag, model, tokens, count = _PLAN.unpack_from(data)
        if magic != _PLAN_MAGIC or count < 0 or tokens < 1:
            raise Unavailable("no plan of an export")
        end = _PLAN.size + entries_bytes(count, tokens)
        entries = unpack_entries(data[_PLAN.size : end], count, tokens)
        if len(data) != end + 9 * count:
            raise Unavailable("no whole plan")
        blocks, leaves = array("q", data[end : end + 8 * count]), data[end + 8 * count :]
        chosen = [Chosen(entry, block, bool(leaf)) for entry, block, leaf in zip(entries, blocks, leaves, strict=True)]
        return cls(model, tokens, chosen, tag)


# -- memory ----------------------------------------------------------------------------------------------------------
def _available() -> int:
    """Bytes of memory that may still be taken, by the machine's count and by this control group's."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or one without a limit
        group = Path("/sys/fs/cgroup")
        most, now = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(kinds["active_file"]) + int(kinds["inactive_file"])  # given back when others need it
        available = min(available, most - now + files)
    return available


def reserve(descriptor: int, size: int) -> None:
    """Have `size` bytes at hand. Memory without a name has no bound of its own: taking too much would kill processes.

    Raises:
        OSError: there is not twice as much memory.
    """
    if 2 * size > (available := _available()):
        raise OSError(errno.ENOMEM, f"{size} bytes of KV blocks, with {available} bytes of memory available")
    os.posix_fallocate(descriptor, 0, size)


def nameless(label: str, size: int = 0) -> int:
    """The descriptor of fresh memory without a name, `size` bytes of it at hand.

    Raises:
        OSError: there is not so much memory.
    """
    descriptor = os.memfd_create(f"gyre-{label}")
    try:
        if size:
            reserve(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def path_of(pid: int, descriptor: int) -> str:
    """The path under which other processes of this user open a descriptor of a process."""
    return f"/proc/{pid}/fd/{descriptor}"


@contextlib.contextmanager
def mapped(path: str) -> Iterator[mmap.mmap]:
    """A page or shard, mapped while the context lasts.

    Raises:
        Unavailable: its process is gone, or it is empty.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from error
    try:
        memory = mmap.mmap(descriptor, 0)
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path}: {error}") from error
    finally:
        os.close(descriptor)
    try:
        yield memory
    finally:
        with contextlib.suppress(BufferError):  # somebody still looks at it: it goes with the last of them
            memory.close()


def read_page(path: str, tag: bytes) -> Page:
    """The page at a path.

    Raises:
        Unavailable: the engine is gone, or another process has its number now.
    """
    with mapped(path) as memory:
        page = Page.unpack(memory)
    if page.tag != tag:
        raise Unavailable(f"{path} is another engine's")
    return page


def check(
    memory: mmap.mmap,
    generation: int,
    policy: int,
    model: bytes | None,
    layout: bytes | None = None,
    tag: bytes | None = None,
) -> Header:
    """A mapped shard's header, if it is of this generation, policy and kind, and the very one that is meant.

    Raises:
        Unavailable: it is not, or there is less of it than it says.
    """
    header = Header.unpack(memory)
    if header.generation != generation:
        raise Unavailable(f"the blocks of generation {generation} were given up")
    if tag is not None and header.tag != tag:
        raise Unavailable("another shard than the one that was found")
    if header.policy != policy:
        raise Unavailable(f"blocks of policy {header.policy}, not {policy}")
    if model is not None and header.model != model:
        raise Unavailable("blocks of another model, or in another shape")
    if layout is not None and header.layout != layout:
        raise Unavailable("blocks in another layout")
    if header.size > len(memory):
        raise Unavailable("a shard without all of its blocks")
    return header


def give_up(descriptor: int) -> None:
    """Have every later reader of a shard see that its blocks are not to be used any more."""
    os.pwrite(descriptor, struct.pack("<q", -1), _GENERATION_AT)
