"""How ranks find each other: rank 0 begins an attempt and writes where its store is, the others join it.

The rendezvous is a file in the run directory, which every rank can read anyway. It names the job it belongs to, so
that a rank never joins the attempt of an earlier start of the same run.
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from gyre import config as configuration
from gyre.config import Config
from gyre.errors import StoreLost, Superseded
from gyre.launch import check, node
from gyre.launch.identity import Identity
from gyre.launch.plan import Layout
from gyre.run_dir import RunDir, read_json, write_atomic
from gyre.status import RankKind
from gyre.store import Store

POLL_SECONDS = 0.2
CONNECT_SECONDS = 5.0
#: Key by which a store shows that it is of the attempt whose prefix it has.
OPEN = "open"


@dataclass(frozen=True)
class RankContext:
    """Everything a supervisor and its children need to know about the run and their place in it."""

    config: Config
    run_dir: RunDir
    identity: Identity
    layout: Layout
    attempt: int
    incarnation: int
    store: Store
    store_address: tuple[str, int]
    secret: str
    address: str  # of this node, as other ranks reach it
    scratch: Path  # node-local, of this rank
    again: bool = False  # this job has begun an attempt before; ranks may have been lost in that one

    @property
    def rank(self) -> int:
        """This rank."""
        return self.identity.rank

    @property
    def prefix(self) -> str:
        """Prefix of the attempt's keys in the store."""
        return store_prefix(self.run_dir, self.attempt)

    def kind(self, rank: int) -> RankKind:
        """What a rank is, in the words that people see."""
        kind = self.layout.kind(rank)
        if kind == "cell":
            return "core" if rank == 0 else "satellite"
        return kind

    def log(self, name: str) -> Path:
        """Path of the log of one of this rank's processes."""
        return self.run_dir.attempt(self.attempt) / f"{name}-{self.rank}.log"


class Ended(Exception):
    """The job's rank 0 is done; the others have nothing to join. The code is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"rank 0 ended with {code}")
        self.code = code


def store_prefix(run_dir: RunDir, attempt: int) -> str:
    """Prefix of an attempt's keys in the store."""
    return f"gyre/{run_dir.name}/{attempt}"


def announce_end(run_dir: RunDir, job_key: str, code: int) -> None:
    """Tell ranks that may still look for an attempt that this job will not begin another one."""
    if run_dir.path.is_dir():
        write_atomic(run_dir.rendezvous, f'{{"key": "{job_key}", "ended": {code}}}', mode=0o600)


def _context(run_dir: RunDir, identity: Identity, config: Config, store: Store, meeting: dict) -> RankContext:
    scratch = node.scratch(config, run_dir.name, meeting["attempt"], identity.rank)
    return RankContext(
        config=config,
        run_dir=run_dir,
        identity=identity,
        layout=Layout.of(config),
        attempt=meeting["attempt"],
        incarnation=store.add(f"incarnation/{identity.rank}", 1),
        store=store,
        store_address=(meeting["host"], meeting["port"]),
        secret=meeting["secret"],
        address=node.address(config, identity),
        scratch=scratch,
    )


def begin(run_dir: RunDir, identity: Identity, stack: ExitStack) -> RankContext:
    """Rank 0: lock the run, number the attempt, serve its store and write the rendezvous.

    Raises:
        UserError: another attempt of this run is alive, or the ranks are not those that the configuration needs.
    """
    stack.enter_context(run_dir.locked())
    config = configuration.load(run_dir.config)
    check.world(config, identity)
    attempt = run_dir.next_attempt()
    address = node.address(config, identity)
    store = Store.host(store_prefix(run_dir, attempt), address, node.port(config, "store"))
    store.set(OPEN, "1")
    last = read_json(run_dir.rendezvous) or {}
    meeting = {
        "key": identity.job_key,
        "attempt": attempt,
        "host": address,
        "port": store.port,
        "secret": secrets.token_urlsafe(32),
    }
    context = _context(run_dir, identity, config, store, meeting)
    write_atomic(run_dir.rendezvous, json.dumps(meeting), mode=0o600)
    return replace(context, again=last.get("key") == identity.job_key)


def join(run_dir: RunDir, identity: Identity) -> RankContext:
    """Every other rank: wait for this job's rendezvous and connect to the store named there.

    Raises:
        Ended: rank 0 will not begin another attempt.
        StoreLost: no store answered in time.
    """
    config = configuration.load(run_dir.config)
    deadline = time.monotonic() + config.network.start_timeout
    fault = "rank 0 has not begun"
    while time.monotonic() < deadline:
        meeting = read_json(run_dir.rendezvous)
        if meeting and meeting["key"] == identity.job_key:
            if "ended" in meeting:
                raise Ended(meeting["ended"])
            prefix = store_prefix(run_dir, meeting["attempt"])
            try:
                store = Store.connect(prefix, meeting["host"], meeting["port"], CONNECT_SECONDS)
                if store.get(OPEN) is None:  # with fixed ports, a later attempt's store answers at an old address
                    raise StoreLost("the store is of another attempt")
                return _context(run_dir, identity, config, store, meeting)
            except StoreLost as error:
                fault = str(error)
        time.sleep(POLL_SECONDS)
    raise StoreLost(f"rank {identity.rank} found no attempt in {config.network.start_timeout:g} s: {fault}")


def ensure_current(context: RankContext) -> None:
    """Raise `Superseded` where a newer incarnation of this rank exists."""
    newest = context.store.add(f"incarnation/{context.rank}", 0)
    if newest != context.incarnation:
        raise Superseded(f"rank {context.rank}: incarnation {newest} exists, this is {context.incarnation}")
