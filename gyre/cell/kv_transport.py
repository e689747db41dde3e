"""How an engine gets at KV blocks that another engine left for it: shared memory on one host, a socket between hosts.

Both find the prefix of a request in the other engine's index and hand over *shards*, memory that every worker of this
engine can map. On one host these are the source's own. Over a socket the blocks are copied into shards of our own
first, by a thread, so that neither scheduling nor computing waits for the network. The socket is that of the source's
gate, which wants the run's key.

A search is asked again and again until it has an answer; it waits, within bounds, for an export that is on its way.
Nothing here trusts the words it is given: an address is signed with the run's key, since the key is sent to it.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from gyre.cell.kv_index import Match
from gyre.cell.kv_segment import (
    Page,
    Stage,
    Unavailable,
    path_of,
)

#: Seconds that a source may take from the request's arrival to the closing of its gate: its order is on the way.
BEGIN_SECONDS = 0.5
#: Seconds that an export may take.
EXPORT_SECONDS = 10.0

_ADDRESS = re.compile(
    r"([0-9a-f-]{1,80})/(\d{1,9})/(\d{1,6})/([0-9a-f]{32})/([0-9a-f]{32})@(https?://[^/?#@\s]{1,200})"
)


def this_host() -> str:
    """What processes have in common that see each other's memory under /proc: the kernel, and the process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino:x}"


@dataclass(frozen=True)
class Address:
    """Where an engine leaves KV blocks: its host, the process and descriptor of its page, and its gate's URL."""

    host: str
    pid: int
    descriptor: int
    tag: bytes
    url: str

    def encode(self, secret: str) -> str:
        """One word, signed with the run's key."""
        place = f"{self.host}/{self.pid}/{self.descriptor}/{self.tag.hex()}"
        return f"{place}/{_signature(secret, f'{place}@{self.url}')}@{self.url}"

    @classmethod
    def decode(cls, text: str, secret: str) -> Address:
        """The address of its word.

        Raises:
            Unavailable: no engine of this run gave it out.
        """
        if not isinstance(text, str) or (found := _ADDRESS.fullmatch(text)) is None:
            raise Unavailable("no address of KV blocks")
        host, pid, descriptor, tag, signature, url = found.groups()
        if not hmac.compare_digest(signature, _signature(secret, f"{host}/{pid}/{descriptor}/{tag}@{url}")):
            raise Unavailable("an address that no engine of this run gave out")
        return cls(host, int(pid), int(descriptor), bytes.fromhex(tag), url)

    @property
    def page(self) -> str:
        """The path of its page, on its own host."""
        return path_of(self.pid, self.descriptor)


def _signature(secret: str, text: str) -> str:
    return blake2b(text.encode(), key=blake2b(secret.encode()).digest(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Wanted:
    """What a request says of its execution's earlier engine: where its blocks are, of which epoch and policy."""

    address: Address
    epoch: int
    policy: int

    @classmethod
    def of(cls, parameters: Any, secret: str) -> Wanted:
        """Of the value of ``kv_transfer_params["gyre"]``.

        Raises:
            Unavailable: it is not what a proxy sends.
        """
        fields = parameters if isinstance(parameters, dict) else {}
        epoch, policy = fields.get("epoch"), fields.get("policy")
        if type(epoch) is not int or type(policy) is not int:
            raise Unavailable("kv_transfer_params.gyre has no numbers epoch and policy")
        return cls(Address.decode(fields.get("address"), secret), epoch, policy)


@dataclass(frozen=True)
class Kind:
    """What blocks have to be to be of use here: of this model, so many tokens each."""

    model: bytes
    tokens: int


class Found:
    """Blocks that were found: where each worker reads them, which slots in order, and how many tokens they hold."""

    def __init__(
        self,
        wanted: Wanted,
        shards: tuple[str, ...],
        match: Match,
        generation: int,
        tag: bytes,
        own: Sequence[int] = (),
    ) -> None:
        self.policy = wanted.policy
        self.generation = generation
        self.tag = tag
        self.shards = shards
        self.slots, self.tokens = match.slots, match.tokens
        self._own = list(own)

    def close(self) -> None:
        """Give copies back; what is mapped stays."""
        while self._own:
            os.close(self._own.pop())


def ready(page: Page, wanted: Wanted, waited: float) -> bool:
    """Whether a source's blocks may be read; False if they may be soon. `waited` is in seconds since the first look.

    Raises:
        Unavailable: they never will.
    """
    if page.epoch != wanted.epoch:
        raise Unavailable(f"the source is in epoch {page.epoch}, not {wanted.epoch}")
    if page.policy != wanted.policy:
        raise Unavailable(f"the source serves policy {page.policy}, not {wanted.policy}")
    if page.stage is Stage.READY and page.generation == wanted.epoch and page.fds:
        return True
    if page.stage is Stage.SERVING and waited < BEGIN_SECONDS:
        return False
    if page.stage in (Stage.PINNING, Stage.EXPORTING) and waited < EXPORT_SECONDS:
        return False
    raise Unavailable(f"the source is {page.stage.name.lower()} after {waited:.1f} s")


class Search(Protocol):
    """A search for one request's prefix."""

    def poll(self, now: float) -> Found | None:
        """What was found, or None while it is not known. Raises `Unavailable` when there is nothing to be found."""

    def wait(self, seconds: float) -> None:
        """Pass the time until there may be news, or until `seconds` are over, without computing."""

    def close(self) -> None:
        """Nobody wants the answer any more."""


class Transport(Protocol):
    """A way to another engine's blocks."""

    def search(self, wanted: Wanted, tokens: Sequence[int], kind: Kind) -> Search:
        """Begin to look for the longest prefix of `tokens` among the blocks."""
