"""KV blocks of an engine on this host: its own shards, mapped."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from gyre.cell.kv_index import Index
from gyre.cell.kv_segment import Page, check, mapped, path_of, read_index, read_page
from gyre.cell.kv_transport import Found, Kind, Search, Wanted, ready


class Shared:
    """The source's own shards, mapped."""

    def __init__(self) -> None:
        self._indices: OrderedDict[bytes, Index] = OrderedDict()

    def search(self, wanted: Wanted, tokens: Sequence[int], kind: Kind) -> Search:
        """Begin to look."""
        return _SharedSearch(self, wanted, tokens, kind)

    def index(self, wanted: Wanted, page: Page, kind: Kind) -> tuple[bytes, Index]:
        """The tag of a source's shards, and the index of their blocks; the latest few are remembered."""
        with mapped(path_of(wanted.address.pid, page.fds[0])) as memory:
            header = check(memory, page.generation, wanted.policy, kind.model)
            if header.tag not in self._indices:
                self._indices[header.tag] = read_index(memory, header)
        while len(self._indices) > 4:
            self._indices.popitem(last=False)
        return header.tag, self._indices[header.tag]


class _SharedSearch:
    def __init__(self, transport: Shared, wanted: Wanted, tokens: Sequence[int], kind: Kind) -> None:
        self._transport = transport
        self._wanted = wanted
        self._tokens = tokens
        self._kind = kind
        self._began: float | None = None

    def poll(self, now: float) -> Found | None:
        wanted = self._wanted
        self._began = now if self._began is None else self._began
        page = read_page(wanted.address.page, wanted.address.tag)
        if not ready(page, wanted, now - self._began):
            return None
        tag, index = self._transport.index(wanted, page, self._kind)
        shards = tuple(path_of(wanted.address.pid, descriptor) for descriptor in page.fds)
        return Found(wanted, shards, index.match(self._tokens), page.generation, tag)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        return
