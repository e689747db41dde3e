"""One try of an execution, from its grant to its outcome file.

The order is the guarantee: the harness is dead before its records are closed, records are on the disk before the
outcome names them, and the outcome is linked once, last (invariant 2). Whoever reads an outcome finds the rest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.child import Child
from gyre.config import Config
from gyre.errors import ChildFailed, GyreError, Superseded
from gyre.events import ExecutionClosed, closed_event
from gyre.harness.process import MARK, Program, environment
from gyre.harness.scoring import Score, score
from gyre.run_dir import RunDir, link_once, read_json, sync_directory

log = logging.getLogger(__name__)

RECORDS = "records.bin"
_CLOSE_SECONDS = 30.0
_SHORTEST_WAIT = 0.25


class TryBroken(GyreError):
    """The infrastructure failed a try: nothing the harness did or could have done."""


@dataclass(frozen=True)
class Host:
    """What a try needs of the host it runs on."""

    run_dir: RunDir
    config: Config
    attempt: int
    rank: int
    job_key: str
    scratch: Path
    proxy: Child
    port: int
    model: str

    @property
    def mark(self) -> str:
        """What the marks of this host's programs begin with: first the key of the job, which no other start has."""
        return f"{self.job_key}/{self.attempt}/{self.rank}/"

    def ensure_attempt(self) -> None:
        """Raise `Superseded` where a newer attempt of the run exists."""
        newest = max((int(p.name) for p in (self.run_dir.path / "attempts").iterdir() if p.name.isdigit()), default=0)
        if newest > self.attempt:
            raise Superseded(f"attempt {newest} of the run exists, this is {self.attempt}")


@dataclass
class Ending:
    """How the harness ended."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0
    score: Score = field(default_factory=lambda: Score(None, "not scored"))


class Try:
    """One try: `run` it once, on a host; `cancel` and `fail` end it early."""

    _host: Host
    _dir: Path
    _mark: str

    def __init__(self, n: int, number: int) -> None:
        self.n = n
        self.number = number
        self.phase = "starting"
        self._interrupted = asyncio.Event()
        self._interruption: Ending | TryBroken | None = None
        self._token = f"gyre-{secrets.token_urlsafe(24)}"

    def cancel(self, reason: str) -> None:
        """Close the execution as cancelled, unless its harness has ended already."""
        self._interrupt(Ending("cancelled", reason))

    def fail(self, reason: str) -> None:
        """The infrastructure has failed."""
        self._interrupt(TryBroken(reason))

    def _interrupt(self, how: Ending | TryBroken) -> None:
        if self._interruption is None:
            self._interruption = how
            self._interrupted.set()

    async def run(self, host: Host, engine: Callable[[], int | None]) -> ExecutionClosed:
        """Run harness and scorer on `host`, and link the outcome; returns the news of it.

        `engine` tells which engine is assigned when the proxy is to know: moves may come before.

        Raises:
            TryBroken: the infrastructure failed; there is no outcome.
            Superseded: there is a newer attempt of the run; nothing was linked.
        """
        self._host = host
        self._dir = host.run_dir.try_dir(self.n, self.number)
        self._mark = f"{host.mark}{self.n}/{self.number}/{secrets.token_hex(8)}"
        host.ensure_attempt()
        if (known := await asyncio.to_thread(self._known_outcome)) is not None:
            return closed_event(known)
        try:
            spec = await asyncio.to_thread(self._prepare)
            await self._register(engine)
            try:
                ending = await self._harness()
                self.phase = "closing"
            finally:
                counts = await self._close_requests()
        except ChildFailed as error:
            raise TryBroken(f"the proxy failed: {error}") from error
        except OSError as error:
            raise TryBroken(f"{type(error).__name__}: {error}") from error
        if isinstance(self._interruption, TryBroken):
            raise self._interruption
        if ending.outcome != "cancelled":
            self.phase = "scoring"
            ending.score = await self._score()
        self.phase = "closing"
        outcome = self._outcome(spec, ending, counts)
        return closed_event(await asyncio.to_thread(self._close, outcome))

    # -- before ------------------------------------------------------------------------------------------------------
    def _known_outcome(self) -> dict[str, Any] | None:
        """The outcome that this attempt has already; one of an earlier attempt, which was not accepted, goes aside."""
        path = self._host.run_dir.outcome(self.n)
        known = read_json(path)
        if known is None or known["attempt"] >= self._host.attempt:
            return known
        os.replace(path, path.with_name(f"outcome.{known['attempt']}.json"))
        return None

    def _prepare(self) -> dict[str, Any]:
        spec = read_json(self._host.run_dir.spec(self.n))
        if spec is None:
            raise FileNotFoundError(f"execution {self.n} has no spec")
        if self._dir.exists():  # of an earlier attempt, or of a host that died: it counts for nothing
            shutil.rmtree(self._dir)
        (self._dir / "workspace").mkdir(parents=True)
        (self._dir / "task.json").write_text(json.dumps(spec["task"]))
        self._temporary.mkdir(parents=True, exist_ok=True)
        return spec

    @property
    def _temporary(self) -> Path:
        return self._host.scratch / f"{self.n}-{self.number}"

    @property
    def _key(self) -> dict[str, int]:
        return {"execution": self.n, "try_number": self.number}

    async def _register(self, engine: Callable[[], int | None]) -> None:
        await self._host.proxy.call(
            "register",
            timeout=_CLOSE_SECONDS,
            **self._key,
            token=self._token,
            engine=engine(),
            record_path=str(self._dir / RECORDS),
        )

    def _env(self, with_model: bool) -> dict[str, str]:
        own = {"GYRE_TASK": str(self._dir / "task.json"), "GYRE_EXECUTION": str(self.n), MARK: self._mark}
        own |= {"TMPDIR": str(self._temporary), "PYTHONUNBUFFERED": "1"}
        if with_model:
            url = f"http://127.0.0.1:{self._host.port}"
            own |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": self._token, "GYRE_MODEL": self._host.model}
            own |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": self._token}
        return environment(os.environ, self._host.config.harness.env, own)

    # -- the harness -------------------------------------------------------------------------------------------------
    async def _harness(self) -> Ending:
        harness = self._host.config.harness
        command = [part.replace("{root}", self._host.config.root) for part in harness.command]
        begun = time.monotonic()
        try:
            program = await Program.start(
                command,
                self._dir / "workspace",
                self._env(with_model=True),
                self._dir / "harness.log",
                self._mark,
                harness.limits,
            )
        except (FileNotFoundError, PermissionError) as error:
            return Ending("failed", f"cannot start {command[0]}: {error.strerror}")
        self.phase = "running"
        try:
            ending = await self._await_end(program, begun)
        finally:
            await program.end()
        ending.seconds = time.monotonic() - begun
        return ending

    async def _await_end(self, program: Program, begun: float) -> Ending:
        """Wait for the exit, the timeout, or an interruption. The clock stands still while requests are held."""
        timeout = self._host.config.harness.timeout
        exited = asyncio.create_task(program.wait())
        interrupted = asyncio.create_task(self._interrupted.wait())
        remaining = timeout
        try:
            while True:
                await asyncio.wait({exited, interrupted}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    code = exited.result()
                    return Ending("completed") if code == 0 else Ending("failed", f"exit code {code}")
                if interrupted.done():
                    return self._interruption if isinstance(self._interruption, Ending) else Ending("failed")
                held = await self._host.proxy.call("held", timeout=_CLOSE_SECONDS, **self._key)
                remaining = timeout - (time.monotonic() - begun - held["seconds"])
                if remaining <= 0 and not held["now"]:
                    return Ending("timed_out", f"ran for more than {timeout:g} s")
                remaining = max(remaining, _SHORTEST_WAIT)
        finally:
            exited.cancel()
            interrupted.cancel()

    async def _close_requests(self) -> dict[str, Any]:
        return await self._host.proxy.call("close", timeout=_CLOSE_SECONDS, **self._key)

    # -- after -------------------------------------------------------------------------------------------------------
    async def _score(self) -> Score:
        config, directory = self._host.config, self._dir
        try:
            return await score(
                config.harness.score,
                config.root,
                directory / "workspace",
                directory / "task.json",
                self._env(with_model=False),
                directory / "harness.log",
                self._mark,
            )
        except OSError as error:
            raise TryBroken(f"scoring: {type(error).__name__}: {error}") from error

    def _outcome(self, spec: dict[str, Any], ending: Ending, counts: dict[str, Any]) -> dict[str, Any]:
        value = ending.score.value
        reasons = [counts.pop("fault", ""), ending.reason, "" if value is not None else ending.score.reason]
        return {
            "n": self.n,
            "try": self.number,
            "attempt": self._host.attempt,
            "group": spec.get("group"),
            "host": self._host.rank,
            "outcome": ending.outcome,
            "score": value,
            "usable": value is not None and counts["tokens"] > 0,
            "reason": "; ".join(filter(None, reasons)),
            "seconds": round(ending.seconds, 3),
            **counts,
            "records": f"{self.number}/{RECORDS}",
        }

    def _close(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Clear up, and link the outcome; if there is one by now, that one counts."""
        self._clear(outcome)
        sync_directory(self._dir)  # the records' own bytes are on the disk already
        while True:
            self._host.ensure_attempt()
            if link_once(self._host.run_dir.outcome(self.n), json.dumps(outcome)):
                return outcome
            if (known := self._known_outcome()) is not None:
                log.warning("execution %d was closed before, by try %d", self.n, known["try"])
                return known

    def _clear(self, outcome: dict[str, Any]) -> None:
        keep = self._host.config.harness.keep_workspaces
        well = outcome["outcome"] == "completed" and outcome["score"] is not None
        if keep == "none" or (keep == "failed" and well):
            shutil.rmtree(self._dir / "workspace", ignore_errors=True)
        shutil.rmtree(self._temporary, ignore_errors=True)
