"""One cell's part in one update: claim, compute, reduce, agree. It knows no model and no DeepSpeed.

The end of an update (or of its suspension) is a *round*: when every claimed micro-step is finished, the core writes
`stream/<u>/round/<r>` with the members and the name of their group; each member answers with its ledger and its
statistics under `.../<rank>`, then all reduce their sums onto the core. The feeder checks that the ledgers may be added
up; only then does the core write the verdict `done` under `.../verdict`, and members let go of their sums. Where a
member died or a group failed the verdict is `again`: members say `.../<rank>/again`, who does not is barred, its
micro-steps go back, the survivors claim them, and the next round uses a new group. Sums stay intact until the verdict.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from gyre.errors import ChildFailed, ReduceFailed, StreamConflict
from gyre.faults import fault
from gyre.training.ledger import Member
from gyre.training.part import Crew, Desk, Part, Sum
from gyre.training.statistics import Statistics
from gyre.training.stream import beating

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_BARRED_POLL_SECONDS = 0.5

End = Literal["done", "suspended", "missed", "failed"]


class CorePart(Part):
    """The core's part: it opens the stream, ends it and collects the sums."""

    def __init__(self, desk: Desk, crew: Crew, total: Sum, generation: int, ranks: Sequence[int]) -> None:
        super().__init__(desk, crew, total)
        self._generation = generation
        self._ranks = list(ranks)
        self._barred: set[Member] = set()
        self._asked = 0.0

    def run(self) -> Literal["done", "suspended"]:
        """Train until the update's sum is complete in the accumulators, or until it is suspended."""
        self.word.open()
        self.desk.emit({"type": "opened", "update": self.update})
        self.stage("training")
        with beating(self.desk.store, self.update, self.desk.member, self.desk.pulse):
            while True:
                word, unfinished = self.work()
                if word == "wait":
                    continue
                if word not in ("closed", "suspended"):
                    raise StreamConflict(f"the feeder answers the core with {word}")
                members = self._members(self.word.end(word))
                self.sum.most = max(self.sum.most, 1 + len(members))
                begun = time.monotonic()
                if unfinished:
                    self.stage("waiting")
                    self._bar_silent(members)
                    time.sleep(_POLL_SECONDS)
                    self.clock.add("wait", begun)
                    continue
                agreed = self._round(members, final=word == "closed")
                self.clock.add("reduce", begun)
                if agreed:
                    return "done" if word == "closed" else "suspended"

    def _members(self, count: int) -> list[Member]:
        """The satellites among the first `count` members that are not barred, in prefix order."""
        members = []
        for position in range(1, count):
            word = self.desk.store.wait(f"stream/{self.update}/member/{position}", self.desk.grace)
            if word is None:
                raise StreamConflict(f"update {self.update} has no member {position}")
            members.append(tuple(json.loads(word)))
        self._ask_barred(force=True)
        return [member for member in members if member not in self._barred]

    def _ask_barred(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._asked > _BARRED_POLL_SECONDS:
            self._barred = self.desk.claims.barred(self.update)
            self._asked = now

    def _bar(self, member: Member, reason: str) -> None:
        log.warning("update %d: barring rank %d (incarnation %d): %s", self.update, *member, reason)
        self.desk.claims.bar(self.update, member, reason)
        self._ask_barred(force=True)

    def _bar_silent(self, members: Sequence[Member]) -> None:
        for member in self._watch.silent(members):
            self._bar(member, f"no life sign for {self.desk.patience:g} s")

    def _lost(self, members: Sequence[Member]) -> bool:
        """Whether one of these has been barred, now or before."""
        self.desk.pulse.beat()
        self._bar_silent(members)
        self._ask_barred()
        return any(member in self._barred for member in members)

    # -- a round -----------------------------------------------------------------------------------------------------
    def _round(self, members: list[Member], final: bool) -> bool:
        """Collect the sums of the core and these satellites; False if it must be done again."""
        store = self.desk.store
        ranks = [0, *(rank for rank, _ in members)]
        number = store.add(f"stream/{self.update}/rounds", 0)
        name = f"g{self._generation}"
        if ranks != self._ranks[: len(ranks)] or store.get(f"groups/{name}/dead"):
            name = f"u{self.update}r{number}"
        self.stage("reducing")
        plan = {"members": [self.desk.member, *members], "group": name, "final": final}
        store.set(self.round_key(number), json.dumps(plan))
        store.add(f"stream/{self.update}/rounds", 1)
        verdict = "again"
        try:
            reports = self._reports(number, members)
            if members:
                self._reduce(name, ranks, members, number)
            if self._settle(reports, members, final):
                self._take(reports, members)
                verdict = "done"
                for member in members:  # the core alone reads them: they would pile up over a long run
                    store.delete(self.round_key(number, f"/{member[0]}"))
        except ReduceFailed as error:
            log.warning("update %d, round %d: %s", self.update, number, error)
            self.lose_group(name, ranks)
        finally:
            store.set(self.round_key(number, "/verdict"), verdict)
        if verdict == "again":
            self.crew.discard()  # perhaps no round with a reduce follows, and it is as large as the sums
            self._await_again(number, members)
        return verdict == "done"

    def _reports(self, number: int, members: Sequence[Member]) -> dict[Member, dict[str, Any]]:
        """Ledgers and statistics of the satellites."""
        reports: dict[Member, dict[str, Any]] = {}
        while len(reports) < len(members):
            for member in members:
                word = self.desk.store.get(self.round_key(number, f"/{member[0]}"))
                if member not in reports and word is not None:
                    reports[member] = json.loads(word)
            if self._lost(members):
                raise ReduceFailed("a member was lost before its ledger came")
            time.sleep(_POLL_SECONDS)
        return reports

    def _reduce(self, name: str, ranks: Sequence[int], members: Sequence[Member], number: int) -> None:
        def called_off() -> bool:
            again = any(self.desk.store.get(self.round_key(number, f"/{m[0]}/again")) for m in members)
            return again or self._lost(members)

        fault(f"update:{self.update}:reducing", 0)
        self.crew.reduce(name, ranks, called_off, self.desk.pulse.beat)

    def _settle(self, reports: dict[Member, dict[str, Any]], members: Sequence[Member], final: bool) -> bool:
        """Have the feeder check the ledgers; False if a member was barred meanwhile (invariant 8)."""
        ledgers = {self.desk.member: self.sum.micro_steps}
        ledgers |= {member: reports[member]["micro_steps"] for member in members}
        answer = self.desk.claims.settle(self.update, ledgers, final)
        if answer["ok"]:
            self.sum.numbers = answer["numbers"]
            return True
        self._ask_barred(force=True)
        if any(member in self._barred for member in members):
            return False
        raise StreamConflict(f"update {self.update}: {answer['fault']}")

    def _take(self, reports: dict[Member, dict[str, Any]], members: Sequence[Member]) -> None:
        """The reduced sum is the core's now."""
        if members:
            self.crew.accept()
        own = len(self.sum.micro_steps) - sum(self.sum.by_rank.values())
        self.sum.by_rank[0] = self.sum.by_rank.get(0, 0) + own
        for member in members:
            steps = reports[member]["micro_steps"]
            self.sum.micro_steps.extend(steps)
            self.sum.statistics.add(Statistics(**reports[member]["statistics"]))
            self.sum.collected += reports[member]["seconds"]
            self.sum.by_rank[member[0]] = self.sum.by_rank.get(member[0], 0) + len(steps)

    def _await_again(self, number: int, members: Sequence[Member]) -> None:
        """Bar whoever does not say that it will go again."""
        deadline = time.monotonic() + self.desk.grace
        missing = list(members)
        while missing:
            self._ask_barred()
            missing = [m for m in missing if m not in self._barred]
            missing = [m for m in missing if not self.desk.store.get(self.round_key(number, f"/{m[0]}/again"))]
            if missing and time.monotonic() > deadline:
                for member in missing:
                    self._bar(member, "it did not answer in a round")
                return
            time.sleep(_POLL_SECONDS)


class SatellitePart(Part):
    """A satellite's part: it joins at its position, computes, and brings its sum to a round."""

    def __init__(self, desk: Desk, crew: Crew, update: int, position: int, core: Member) -> None:
        super().__init__(desk, crew, Sum(update))
        self._position = position
        self._core = core

    def ended(self) -> bool:
        """Whether the window has closed (or is suspended), so that there is no point in pulling weights."""
        state, members = self.word.read()
        return state in ("closed", "suspended") or members > self._position

    def run(self, timeout: float) -> End:
        """Join and take part; the weights are those of the update. At most `timeout` seconds pass before it joins."""
        store, member = self.desk.store, self.desk.member
        store.set(f"stream/{self.update}/member/{self._position}", json.dumps(member))
        deadline = time.monotonic() + timeout
        with beating(store, self.update, member, self.desk.pulse):
            number = store.add(f"stream/{self.update}/rounds", 0)
            while (joined := self.word.join(self._position)) != "joined":
                if joined == "missed" or time.monotonic() > deadline:
                    return "missed"
                self.desk.pulse.beat()
                time.sleep(_POLL_SECONDS)
                number = store.add(f"stream/{self.update}/rounds", 0)
            self.desk.emit({"type": "joined", "update": self.update, "position": self._position})
            fault(f"update:{self.update}:joined", member[0])
            self.stage("training")
            return self._take_part(number)

    def _take_part(self, number: int) -> End:
        """Work and answer rounds, from round `number` on, until one agrees."""
        while True:
            plan = self.desk.store.get(self.round_key(number))
            if plan is not None:
                if self._round(number, json.loads(plan)):
                    return "done" if json.loads(plan)["final"] else "suspended"
                number += 1
                continue
            word, _ = self.work()
            if word == "barred":
                return "failed"
            if word in ("closed", "suspended"):
                self.stage("waiting")
                self._check_core()
                time.sleep(_POLL_SECONDS)

    def _check_core(self) -> None:
        self.desk.pulse.beat()
        if self._watch.silent([self._core]):
            raise ChildFailed(f"update {self.update}: the core has gone silent")

    def _round(self, number: int, plan: dict[str, Any]) -> bool:
        """Bring the sum to a round; whether it was agreed. A round without this member is none of its business."""
        rank = self.desk.member[0]
        if list(self.desk.member) not in plan["members"]:
            return False
        self.stage("reducing")
        report = {
            "micro_steps": self.sum.micro_steps,
            "statistics": asdict(self.sum.statistics),
            "seconds": self.clock.computed,
        }
        self.desk.store.set(self.round_key(number, f"/{rank}"), json.dumps(report))
        ranks = [member[0] for member in plan["members"]]
        verdict_key = self.round_key(number, "/verdict")
        fault(f"update:{self.update}:reducing", rank)

        def called_off() -> bool:
            self._check_core()
            return self.desk.store.get(verdict_key) == "again"

        begun = time.monotonic()
        try:
            self.crew.reduce(plan["group"], ranks, called_off, self.desk.pulse.beat)
        except ReduceFailed as error:
            log.warning("update %d, round %d: %s", self.update, number, error)
            self.lose_group(plan["group"], ranks)
            if self.desk.store.get(verdict_key) != "done":
                self.desk.store.set(self.round_key(number, f"/{rank}/again"), "1")
        while (verdict := self.desk.store.get(verdict_key)) is None:
            self._check_core()
            time.sleep(_POLL_SECONDS)
        if verdict == "again":
            self.desk.store.set(self.round_key(number, f"/{rank}/again"), "1")
        self.clock.add("reduce", begun)
        return verdict == "done"
