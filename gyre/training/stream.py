"""A trainer's side of the stream: claims over HTTP, the state word, life signs.

The word `stream/<u>/state` is `open:<k>`, `closed:<k>` or `suspended:<k>`, where k counts the members so far. It
changes by compare-and-set alone, so that nobody joins a window that has closed or a group of another size (invariant
9): the core opens it, each satellite at its own position raises k by one, the core closes or suspends it.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
import time
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from gyre.errors import ChildFailed, StoreLost, StreamConflict
from gyre.store import Store
from gyre.training.ledger import Member
from gyre.training.packing import MicroStep, decode_all

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
#: One piece of work (a micro-step, a bucket of a reduce, an optimizer step) that takes longer is stuck.
WORK_SECONDS = 600.0
_CLAIM_TIMEOUT = 30.0


@dataclass(frozen=True)
class Answer:
    """What a claim got: micro-steps, or a word: wait, closed, suspended, barred."""

    word: str  # "step" where there are micro-steps
    steps: list[MicroStep] = field(default_factory=list)
    unfinished: int = 0  # micro-steps that members still work on, these included


class Claims:
    """The client of the feeder's HTTP interface; one connection, for one thread."""

    def __init__(self, url: str, secret: str, member: Member) -> None:
        self._url = urllib.parse.urlsplit(url)
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._member = member
        self._connection: http.client.HTTPConnection | None = None

    def claim(
        self, update: int, finished: Sequence[int], holding: Collection[int] = (), want: int = 1, wait: bool = True
    ) -> Answer:
        """Say what is finished and what is in hand, and ask for up to `want` micro-steps more.

        Where there is none yet, but more may come, the answer is `wait`: after up to a second, or at once without
        `wait`. A micro-step that is neither finished nor in `holding` was in an answer that got lost, and comes again.
        """
        rank, incarnation = self._member
        body = {
            "update": update,
            "rank": rank,
            "incarnation": incarnation,
            "finished": list(finished),
            "holding": list(holding),
            "want": want,
            "wait": wait,
        }
        status, headers, data = self._post("/claim", body)
        try:
            steps = decode_all(data) if status == 200 else []
        except ValueError as error:
            raise ChildFailed(f"the feeder's answer to /claim cannot be read: {error}") from error
        return Answer(headers["X-Gyre-Stream"], steps, int(headers["X-Gyre-Unfinished"]))

    def settle(self, update: int, ledgers: Mapping[Member, Sequence[int]], final: bool) -> dict[str, Any]:
        """Ask whether these sums may be added up: {"ok": true, "numbers": ...} or {"ok": false, "fault": ...}."""
        listed = [[rank, incarnation, list(ids)] for (rank, incarnation), ids in ledgers.items()]
        body = {"update": update, "core": list(self._member), "ledgers": listed, "final": final}
        return json.loads(self._post("/settle", body)[2])

    def bar(self, update: int, member: Member, reason: str) -> None:
        """Shut a member out; its micro-steps go back."""
        self._post("/bar", {"update": update, "rank": member[0], "incarnation": member[1], "reason": reason})

    def barred(self, update: int) -> set[Member]:
        """The members that are shut out of an update."""
        data = self._post("/barred", {"update": update})[2]
        return {(rank, incarnation) for rank, incarnation in json.loads(data)["barred"]}

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        """Every request may be sent twice without harm, so a connection that broke is made again, once."""
        data = json.dumps(body)
        for last in (False, True):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(
                    self._url.hostname or "", self._url.port or 80, timeout=_CLAIM_TIMEOUT
                )
            try:
                self._connection.request("POST", path, data, self._headers)
                response = self._connection.getresponse()
                content = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if last:
                    raise ChildFailed(f"the feeder does not answer {path}: {error}") from error
        if response.status not in (200, 204):
            raise StreamConflict(f"the feeder refused {path}: {response.status} {content.decode(errors='replace')}")
        return response.status, response.headers, content

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class StateWord:
    """The state word of one update's stream."""

    def __init__(self, store: Store, update: int) -> None:
        self._store = store
        self._key = f"stream/{update}/state"

    def read(self) -> tuple[str, int]:
        """State and members; ("", 0) where the core has not opened it yet."""
        word = self._store.get(self._key)
        if word is None:
            return "", 0
        state, _, members = word.partition(":")
        return state, int(members)

    def open(self) -> None:
        """The core opens the stream, or opens it again after a suspension."""
        state, members = self.read()
        expected = "" if not state else f"{state}:{members}"
        if state not in ("", "suspended") or self._store.compare_set(self._key, expected, "open:1") != "open:1":
            raise StreamConflict(f"{self._key} is {expected} and cannot be opened")

    def end(self, state: Literal["closed", "suspended"]) -> int:
        """The core ends the joining window; returns how many members there are."""
        while True:
            now, members = self.read()
            word = f"{state}:{members}"
            if now == state or self._store.compare_set(self._key, f"{now}:{members}", word) == word:
                return members

    def join(self, position: int) -> Literal["joined", "wait", "missed"]:
        """A satellite tries to become member number `position`."""
        state, members = self.read()
        if not state or (state == "open" and members < position):
            return "wait"
        if state != "open" or members > position:
            return "missed"
        word = f"open:{position + 1}"
        return "joined" if self._store.compare_set(self._key, f"open:{position}", word) == word else "wait"


class Pulse:
    """Counts the pieces of work of the main thread; one that takes over `limit` seconds is stuck."""

    def __init__(self, limit: float = WORK_SECONDS) -> None:
        self.limit = limit
        self.count = 0

    def beat(self) -> None:
        """A piece of work is done, or a wait is still a wait that looks around."""
        self.count += 1


@contextmanager
def beating(store: Store, update: int, member: Member, pulse: Pulse) -> Iterator[None]:
    """Give life signs in a thread while this member is in an update: a counter that rises.

    A main thread that is stuck (in a driver, a collective, a file system) must not pass for a living one. A satellite
    then falls silent, and the core bars it; the core itself, which nobody bars, ends its process.
    """
    stop = threading.Event()
    clone = store.clone()
    key = beat_key(update, member)

    def run() -> None:
        seen, idle, stuck = pulse.count, 0.0, False
        with suppress(StoreLost):  # the main thread meets it too, and says so
            while not stop.is_set():
                if not stuck:
                    clone.add(key, 1)
                stop.wait(BEAT_SECONDS)
                last, seen = seen, pulse.count
                # beats are counted, not the clock: a process that was stopped for a while was not stuck
                idle = idle + BEAT_SECONDS if seen == last else 0.0
                was, stuck = stuck, idle > pulse.limit
                if stuck and not was and not stop.is_set():
                    log.critical("update %d: one piece of work takes over %g s: stuck", update, pulse.limit)
                    if member[0] == 0:
                        os._exit(1)  # nothing gentler ends a process whose main thread does not come back

    thread = threading.Thread(target=run, name=f"beat {update}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=BEAT_SECONDS)


def beat_key(update: int, member: Member) -> str:
    """Store counter of a member's life signs."""
    return f"stream/{update}/beat/{member[0]}/{member[1]}"


class Watch:
    """Tells which members have given no life sign for `patience` seconds."""

    def __init__(self, store: Store, update: int, patience: float) -> None:
        self._store = store
        self._update = update
        self._patience = patience
        self._seen: dict[Member, tuple[int, float]] = {}
        self._looked = 0.0

    def silent(self, members: Sequence[Member]) -> list[Member]:
        """Members that have gone silent; looks at the store at most a few times a second."""
        now = time.monotonic()
        if now - self._looked < BEAT_SECONDS / 2:
            return []
        if now - self._looked > self._patience / 2:
            self._seen.clear()  # this process itself was away (stopped, or computing): it cannot blame others
        self._looked = now
        gone = []
        for member in members:
            count = self._store.add(beat_key(self._update, member), 0)
            before, since = self._seen.get(member, (-1, now))
            self._seen[member] = (count, now if count != before else since)
            if now - self._seen[member][1] > self._patience:
                gone.append(member)
        return gone
