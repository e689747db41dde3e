"""The key schema of the run's TCPStore, and typed access to it.

All keys live under ``gyre/<run>/<attempt>/``. The store carries control words only, never bulk data (a value over
8 MiB resets its connections), and nothing durable: the truth that outlives an attempt is the run directory.

| key | type | written by | read by |
| --- | --- | --- | --- |
| ``d``, ``p``, ``f`` | counters: executions dispatched, launched, finished | the scheduler alone | nobody yet |
| ``open`` | word: this attempt is served here | rank 0 | ranks that join |
| ``incarnation/<rank>`` | counter: starts of this rank | that rank's supervisor | that rank, scheduler, satellites |
| ``alive/<rank>/<incarnation>`` | counter, raised while healthy | that rank's supervisor | scheduler |
| ``status/<rank>`` | JSON: what the rank is doing, for people | that rank's supervisor | coordinator |
| ``reports`` | list: inputs of the scheduler (`gyre.events`) | everybody | scheduler |
| ``orders/<rank>/<incarnation>`` | list: the scheduler's orders to a cell | scheduler | that supervisor |
| ``host/<rank>/<incarnation>`` | list: grants and route changes to a harness host | scheduler | that host |
| ``feeder`` | URL of the feeder | coordinator | trainers |
| ``snapshots`` | URL of the weight server | coordinator | core trainer, which announces it with each snapshot |
| ``snapshot/<id>`` | JSON: layout, checksum and place of one snapshot | core trainer | whoever pulls |
| ``stream/<u>/state`` | ``open:<k>``, ``closed:<k>`` or ``suspended:<k>``, compared and set | trainers | trainers |
| ``stream/<u>/member/<position>`` | JSON: rank and incarnation of whoever joins there | that satellite | core trainer |
| ``stream/<u>/beat/<rank>/<incarnation>`` | counter: life signs of a member | that trainer | the other members |
| ``stream/<u>/rounds`` | counter: reduce rounds begun | core trainer | members |
| ``stream/<u>/round/<r>`` | JSON: members and group of a round (`gyre.training.update`) | core trainer | members |
| ``stream/<u>/round/<r>/<rank>`` | JSON: a member's ledger; ``.../again``: it goes again | that member | core trainer |
| ``stream/<u>/round/<r>/verdict`` | ``done`` or ``again`` | core trainer | members |
| ``groups/<name>/dead`` | no group of this name is used any more | whoever it failed for | core trainer |
| ``groups/<name>/<size>/<stage>.<shard>/...`` | torch's own, of a process group | its members | its members |
| ``policy`` | last committed policy version | scheduler, after the commit | nobody yet |
| ``stop`` | ``<exit code>:<how>``: the run ends | coordinator | every supervisor |
| ``gone/<rank>`` | the rank has heard ``stop`` and leaves | that rank's supervisor | coordinator |

A list is a counter ``<name>/count`` and one key per message, ``<name>/<i>`` from 1. Many may append; one reads, and
deletes what it has read, so that the store stays small.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gyre.errors import StoreLost
from gyre.limits import raise_file_limit

Result = TypeVar("Result")

#: A message announced by the counter but not written within this time was never sent: its writer died in between.
LOST_MESSAGE_SECONDS = 5.0


class Store:
    """Typed counters, words and lists under one prefix of a TCPStore.

    A client is serialised, so one that another thread waits on blocks: use `clone` for each thread.
    Every method raises `StoreLost` when the store's host is gone.
    """

    def __init__(self, raw: dist.TCPStore, prefix: str) -> None:
        self._raw = raw
        self._prefix = prefix
        self._store = dist.PrefixStore(prefix, raw)

    @classmethod
    def host(cls, prefix: str, address: str, port: int = 0, timeout: float = 60.0) -> Store:
        """Serve a store from this process; with port 0 the system chooses one (see `port`)."""
        raise_file_limit()  # every worker of every cell has a few connections
        raw = dist.TCPStore(
            address, port, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        return cls(raw, prefix)

    @classmethod
    def connect(cls, prefix: str, address: str, port: int, timeout: float = 60.0) -> Store:
        """Connect to a served store, waiting at most `timeout` seconds."""
        try:
            raw = dist.TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError
            raise StoreLost(f"no store at {address}:{port}: {str(error).splitlines()[0]}") from error
        return cls(raw, prefix)

    @property
    def port(self) -> int:
        """Port the store is served at."""
        return self._raw.port

    @property
    def torch_store(self) -> dist.Store:
        """The prefixed torch store, as process groups want it."""
        return self._store

    def clone(self) -> Store:
        """A connection of its own to the same store, for another thread."""
        return self._guard(lambda: Store(self._raw.clone(), self._prefix))

    def _guard(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise StoreLost(str(error).splitlines()[0]) from error

    # -- words -----------------------------------------------------------------------------------------------------
    def set(self, key: str, value: str) -> None:
        """Write a word."""
        self._guard(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """Read a word, or None where there is none; never waits."""
        return self._guard(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def wait(self, key: str, timeout: float) -> str | None:
        """Read a word, waiting for it up to `timeout` seconds; None if it did not come."""
        deadline = time.monotonic() + timeout
        while (value := self.get(key)) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set `key` to `desired` if it is `expected` ("" creates it); returns the word that stands there now.

        Two proposers of the same word cannot tell who won, so values that compete must name their proposer.
        """
        return self._guard(lambda: self._store.compare_set(key, expected, desired).decode())

    def delete(self, key: str) -> None:
        """Remove a word, if it is there."""
        self._guard(lambda: self._store.delete_key(key))

    # -- counters --------------------------------------------------------------------------------------------------
    def add(self, key: str, amount: int = 1) -> int:
        """Raise a counter and return its new value; an amount of 0 reads it."""
        return self._guard(lambda: self._store.add(key, amount))

    # -- lists -----------------------------------------------------------------------------------------------------
    def send(self, name: str, message: dict[str, Any]) -> None:
        """Append a message to a list."""
        index = self.add(f"{name}/count", 1)
        self.set(f"{name}/{index}", json.dumps(message, separators=(",", ":")))

    def inbox(self, name: str) -> Inbox:
        """The reader of a list; there must be only one."""
        return Inbox(self, name)


class Inbox:
    """Reads a list in order, without waiting, and deletes what it has read."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._next = 1
        self._gap_since: float | None = None

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call, oldest first."""
        messages: list[dict[str, Any]] = []
        count = self._store.add(f"{self._name}/count", 0)
        while self._next <= count:
            key = f"{self._name}/{self._next}"
            value = self._store.get(key)
            if value is None:
                now = time.monotonic()
                self._gap_since = self._gap_since or now
                if now - self._gap_since < LOST_MESSAGE_SECONDS:
                    break
            else:
                self._store.delete(key)
                messages.append(json.loads(value))
            self._gap_since = None
            self._next += 1
        return messages
