"""A cell's workers as its lead sees them: itself, and followers in processes of their own.

The lead has every operation carried out by all workers in the same order: it tells the followers, does it itself, and
takes their answers, which come in that order. While micro-steps are in flight answers are taken as they come; whatever
follows upon them waits for all. When a follower ends, the lead's process ends at once: a cell fails as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from gyre.errors import EXIT_FAULT, ChildFailed, GyreError, ReduceFailed, UserError
from gyre.training.follower import FD_VARIABLE
from gyre.training.frames import Frames
from gyre.training.packing import MicroStep, blank, encode
from gyre.training.part import Finished
from gyre.training.statistics import Statistics
from gyre.training.worker import Start, Worker

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.002
_ASK_SECONDS = 0.1
_STOP_SECONDS = 5.0


def spawn(number: int, descriptor: int) -> subprocess.Popen[bytes]:
    """Start worker `number` with its end of a socket pair; it is in this process's group and writes into its log."""
    return subprocess.Popen(
        [sys.executable, "-m", "gyre.training.follower"],
        stdin=subprocess.DEVNULL,
        env={**os.environ, FD_VARIABLE: str(descriptor)},
        pass_fds=(descriptor,),
    )


class Link:
    """The lead's end of one follower: what was asked of it and what it answered."""

    def __init__(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = spawn(number, theirs.fileno())
        self.number = number
        self.asked = 0  # answers that are to come
        self._frames = Frames(ours)
        self._ending = False
        threading.Thread(target=self._watch, name=f"worker {number}", daemon=True).start()

    def _watch(self) -> None:
        code = self.process.wait()
        if not self._ending:
            log.critical("worker %d of this cell ended with %s: the cell ends", self.number, code)
            os._exit(EXIT_FAULT)  # the main thread may be in a collective that nobody will answer

    def send(self, do: str, body: bytes = b"", **arguments: Any) -> None:
        """Have it do something; its answer comes after those that are to come already."""
        try:
            self._frames.send({"do": do, "arguments": arguments}, body)
        except OSError as error:
            raise ChildFailed(f"worker {self.number} is gone") from error
        self.asked += 1

    def call_off(self) -> None:
        """Have it give the reduce up that it is in."""
        with contextlib.suppress(OSError):
            self._frames.send({"do": "call_off"})

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether an answer that is to come is there."""
        return self.asked > 0 and self._frames.ready(timeout)

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            ReduceFailed: the operation was a reduce, and failed.
            UserError: the follower says that the input is at fault.
            ChildFailed: it failed otherwise, or is gone.
        """
        frame = self._frames.receive()
        self.asked -= 1
        if frame is None:
            raise ChildFailed(f"worker {self.number} is gone")
        head = frame[0]
        if "reduce_failed" in head:
            raise ReduceFailed(f"worker {self.number}: {head['reduce_failed']}")
        if "user_error" in head:
            raise UserError(head["user_error"])
        if "error" in head:
            raise ChildFailed(f"worker {self.number}: {head['error']}")
        return head["result"]

    def close(self) -> None:
        """Close this end, upon which the follower ends."""
        self._ending = True
        self._frames.close()


class Crew:
    """All workers of this cell (`gyre.training.part.Crew`, and what else a trainer asks of them)."""

    def __init__(self, lead: Worker, links: Sequence[Link], stages: int, shards: int) -> None:
        """Of workers that are ready: the lead's own, and followers in the order of their numbers."""
        self.width = shards
        self.in_flight: set[int] = set()
        self._lead, self._links, self._stages = lead, links, stages
        self._done: dict[int, tuple[int, Statistics]] = {}  # by micro-step: stages that have it in their sums
        self._broken = False

    @classmethod
    def start(cls, start: Start, stages: int, shards: int) -> Crew:
        """Start the followers, and have everyone build its part of the model.

        Raises:
            UserError: one of them says that the input is at fault.
            ChildFailed: one of them failed.
        """
        links = [Link(number) for number in range(1, stages * shards)]
        meeting: dist.Store = dist.HashStore()
        if links:
            meeting = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        for link in links:
            link.send("start", number=link.number, port=meeting.port, **asdict(start))
        lead = Worker(start, 0, meeting)
        for link in links:
            link.answer()
        crew = cls(lead, links, stages, shards)
        crew.order("join")
        return crew

    def close(self) -> None:
        """End the followers."""
        for link in self._links:
            link.close()
        for link in self._links:
            try:
                link.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                link.process.kill()

    # -- operations of all -------------------------------------------------------------------------------------------
    def order(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Have all workers do something; returns their answers, by number.

        Raises:
            UserError, GyreError: one of them failed; the cell is of no use any more where it has several workers.
        """
        with self._together():
            for link in self._links:
                link.send(do, **arguments)
            own = getattr(self._lead, do)(**arguments) or {}
            return [own, *(self._last(link) for link in self._links)]

    def _last(self, link: Link) -> dict[str, Any]:
        self._take(link, but=1)
        return link.answer()

    def _take(self, link: Link, but: int = 0) -> None:
        """Take all answers but the last ones: they are of micro-steps, blanks perhaps, for which nobody waits."""
        while link.asked > but:
            self._note(link.answer())

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What fails here leaves workers out of step with each other, unless it was a reduce."""
        if self._broken:
            raise ChildFailed("the workers of this cell are out of step since an operation failed")
        try:
            yield
        except ReduceFailed:
            raise
        except BaseException:
            self._broken = bool(self._links)
            raise

    # -- micro-steps -------------------------------------------------------------------------------------------------
    def begin(self, update: int) -> None:
        """Start new sums from zero."""
        self.order("begin", update=update)

    def feed(self, steps: Sequence[MicroStep]) -> list[Finished]:
        """Compute up to `width` micro-steps; returns what is finished by now, perhaps others."""
        self.in_flight.update(step.id for step in steps)
        own = [*steps, *(blank() for _ in range(self.width - len(steps)))]
        with self._together():
            bodies = [encode(step) for step in own] if self._links else []
            for link in self._links:
                link.send("feed", bodies[link.number % self.width])
            self._note(self._lead.feed(own[0]))
            for link in self._links:
                while link.ready():
                    self._note(link.answer())
        return self._finished()

    def drain(self) -> list[Finished]:
        """Finish what is in flight."""
        for answer in self.order("drain"):
            self._note(answer)
        return self._finished()

    def abandon(self) -> list[Finished]:
        """Have nothing in flight any more, whatever comes of it: what an update that failed leaves is in no other's."""
        try:
            return self.drain()
        except GyreError as error:
            log.warning("what was in flight is lost: %s", error)
            return []
        finally:
            self.in_flight.clear()
            self._done.clear()

    def _note(self, answer: dict[str, Any]) -> None:
        """A worker has some micro-steps in its sums; one of the last stage knows their statistics."""
        for id, statistics in answer["done"]:
            if id:  # a blank has none
                count, known = self._done.get(id, (0, Statistics()))
                if statistics is not None:
                    known = Statistics(**statistics)
                self._done[id] = (count + 1, known)

    def _finished(self) -> list[Finished]:
        ready = [Finished(id, known) for id, (count, known) in self._done.items() if count == self._stages]
        for id, _ in ready:
            del self._done[id]
            self.in_flight.discard(id)
        return ready

    # -- sums --------------------------------------------------------------------------------------------------------
    def reduce(
        self, group: str, ranks: Sequence[int], called_off: Callable[[], bool], progress: Callable[[], None]
    ) -> None:
        """Add the sums of these ranks up, each worker with its equals; see `gyre.training.part.Crew`.

        Raises:
            ReduceFailed: one of the workers' groups failed, or the reduce was called off.
        """
        self._fold()
        waiting = deque(self._links)
        failures: list[ReduceFailed] = []

        def look() -> bool:
            """Take answers that are there; whether the reduce is over for somebody, in vain."""
            for link in list(waiting):
                if link.ready():
                    waiting.remove(link)
                    try:
                        link.answer()
                    except ReduceFailed as error:
                        failures.append(error)
            return bool(failures)

        with self._together():
            for link in self._links:
                self._take(link)
                link.send("reduce", group=group, ranks=list(ranks))
            try:
                self._lead.reduce(group, list(ranks), lambda: look() or called_off(), progress)
            except ReduceFailed as error:
                failures.append(error)
            off, ask = False, time.monotonic()
            while look() or waiting:
                due = time.monotonic() >= ask  # it reads a word of each member, of the store that all cells share
                if not off and (failures or (due and called_off())):
                    off = True
                    failures.append(ReduceFailed("called off"))
                    for link in waiting:
                        link.call_off()
                if due:
                    ask = time.monotonic() + _ASK_SECONDS
                if not waiting:
                    break
                time.sleep(_POLL_SECONDS)
        if failures:
            raise failures[0]

    def _fold(self) -> None:
        """Sums that belong together are on one stage; doing it again adds nothing."""
        if self._stages > 1:
            self.order("fold")

    def accept(self) -> None:
        """The total of the last reduce is the sum now."""
        self.order("accept")

    def discard(self) -> None:
        """The total of the last reduce is of no use, or is none: give its memory back."""
        self.order("discard")

    def forget(self, group: str, ranks: Sequence[int]) -> None:
        """Drop a group that failed."""
        self.order("forget", group=group, ranks=list(ranks))

    # -- the core's step ---------------------------------------------------------------------------------------------
    def step(self, scale: float, clip_norm: float, lr: float) -> float:
        """Multiply the sum by `scale`, clip, take the optimizer step; returns the norm before clipping.

        A scale of 0 says that there was nothing to learn from; then no step is taken. None is taken either where the
        norm is no finite number: all workers leave their weights as they are, also those whose own sums are sound.
        """
        self._fold()
        norm = 0.0
        if scale > 0:
            norm = math.sqrt(sum(answer["square_sum"] for answer in self.order("square_sum"))) * scale
            scale *= min(1.0, clip_norm / norm if norm else 1.0) if math.isfinite(norm) else 0.0
        self.order("step", scale=scale, lr=lr)
        return norm
