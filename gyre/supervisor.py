"""A rank's supervisor: joins the attempt, starts what the rank is (cell, standalone engine, harness host), keeps it
alive and ends it cleanly. It never computes, so it always answers.

It leaves with `EXIT_RESTART` when the store is gone (rank 0 died: there may be another attempt to join) or a child that
it cannot do without has failed, and with the run's own exit code when rank 0 says that the run ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import AsyncExitStack, ExitStack
from typing import Protocol

from gyre import attempt, status
from gyre.attempt import Ended, RankContext
from gyre.cell.supervisor import CellSupervisor
from gyre.coordinator import Coordinator
from gyre.errors import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RESTART,
    EXIT_USER,
    ChildFailed,
    StoreLost,
    Superseded,
    UserError,
    WeightsMismatch,
)
from gyre.events import Event, RankLost, encode
from gyre.harness.host import HostSupervisor
from gyre.launch.identity import Identity, identify
from gyre.memory import tree_pss_mb
from gyre.run_dir import RunDir
from gyre.status import RankStatus

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
STOP_POLL_SECONDS = 0.2
PSS_SECONDS = 3.0


class Occupant(Protocol):
    """What a rank is."""

    async def start(self) -> None:
        """Start children and report `RankReady`."""

    async def run(self) -> None:
        """Do the rank's work until cancelled; raises when it cannot go on."""

    async def stop(self) -> None:
        """End all children."""

    def status(self) -> RankStatus:
        """What it is doing, for people."""


def reporter(context: RankContext):
    """A function that tells the scheduler something."""

    def report(event: Event) -> None:
        context.store.send("reports", encode(event))

    return report


def occupant(context: RankContext) -> Occupant:
    """What this rank is to be."""
    report = reporter(context)
    if context.kind(context.rank) == "host":
        return HostSupervisor(context, report)
    return CellSupervisor(context, report)


async def _heartbeat(context: RankContext) -> None:
    """Say that this rank lives; notice when it has been superseded."""
    while True:
        context.store.add(f"alive/{context.rank}/{context.incarnation}", 1)
        attempt.ensure_current(context)
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def _publish_status(context: RankContext, occupant: Occupant) -> None:
    """Put what this rank is doing into the store, for the live view."""
    pss, measured = 0.0, 0.0
    while True:
        if time.monotonic() - measured > PSS_SECONDS:
            pss, measured = await asyncio.to_thread(tree_pss_mb, os.getppid()), time.monotonic()
        current = occupant.status()
        current.pss_mb = pss
        context.store.set(f"status/{context.rank}", status.encode(current))
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def _await_stop(context: RankContext) -> int:
    """Wait until rank 0 says why the run ends; returns this rank's exit code."""
    while (word := context.store.get("stop")) is None:
        await asyncio.sleep(STOP_POLL_SECONDS)
    return int(word.partition(":")[0])


def _configure_logging(context: RankContext) -> None:
    logging.basicConfig(
        filename=context.log("rank"),
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )


async def _first(*tasks: asyncio.Task[object]) -> asyncio.Task[object]:
    """Wait for the first of some tasks to end, and cancel the others; a failed one counts first."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next((task for task in done if task.exception()), done[0])


async def supervise(context: RankContext) -> int:
    """Be this rank until the run ends; returns the exit code."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted.set)
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, context.scratch, ignore_errors=True)
        os.environ["TMPDIR"] = str(context.scratch)  # what libraries of the children put there goes with it
        coordinator = Coordinator(context) if context.rank == 0 else None
        if coordinator:
            stack.push_async_callback(coordinator.stop)
        part = occupant(context)
        stack.push_async_callback(part.stop)
        background = [
            asyncio.create_task(_heartbeat(context), name="heartbeat"),
            asyncio.create_task(_publish_status(context, part), name="status"),
        ]
        work = asyncio.create_task(_live(context, part, coordinator), name="work")
        stop = asyncio.create_task(_await_stop(context), name="stop")
        signalled = asyncio.create_task(interrupted.wait(), name="signal")
        ended = await _first(stop, work, signalled, *background)
        error = ended.exception()
        if ended in (stop, signalled) and error is None:
            if coordinator and ended is signalled:
                await coordinator.interrupt()
            with contextlib.suppress(StoreLost):
                context.store.set(f"gone/{context.rank}", "1")
            return EXIT_INTERRUPTED if ended is signalled else stop.result()
        error = error or ChildFailed(f"{ended.get_name()} ended by itself")
        try:
            if coordinator:
                await coordinator.fail(error)
            else:
                reporter(context)(RankLost(context.rank, context.incarnation, str(error)))
        except (OSError, StoreLost) as another:  # what cannot be told must not hide what happened
            log.error("cannot tell of the end: %s", another)
        raise error


async def _live(context: RankContext, part: Occupant, coordinator: Coordinator | None) -> None:
    if coordinator is None:
        await _start_and_run(part)
        return
    await coordinator.start()
    driving = asyncio.create_task(coordinator.run(), name="coordinator")
    starting = asyncio.create_task(_start_and_run(part), name="rank")
    (await _first(driving, starting)).result()


async def _start_and_run(part: Occupant) -> None:
    await part.start()
    await part.run()


def _enter(run_dir: RunDir, identity: Identity, stack: ExitStack) -> RankContext:
    if identity.rank == 0:
        return attempt.begin(run_dir, identity, stack)
    return attempt.join(run_dir, identity)


def main(run_dir: str) -> int:
    """Supervise this process's rank; returns the exit code."""
    identity = identify(os.environ)
    with ExitStack() as stack:
        try:
            context = _enter(RunDir(run_dir), identity, stack)
        except Ended as error:
            return error.code
        except StoreLost as error:
            print(f"gyre: rank {identity.rank}: {error}", file=sys.stderr, flush=True)
            return EXIT_FAULT
        except UserError as error:
            print(f"gyre: {error}", file=sys.stderr, flush=True)
            return EXIT_USER
        return _supervise_to_the_end(context)


def _supervise_to_the_end(context: RankContext) -> int:
    """Map how supervising ended to an exit code."""
    _configure_logging(context)
    try:
        return asyncio.run(supervise(context))
    except UserError as error:
        print(f"gyre: {error}", file=sys.stderr, flush=True)
        return EXIT_USER
    except StoreLost as error:
        log.warning("the store is lost: %s", error)
        return EXIT_RESTART
    except Superseded as error:
        log.warning("%s", error)
        return EXIT_OK
    except (ChildFailed, WeightsMismatch) as error:
        log.exception("a child failed")
        print(f"gyre: rank {context.rank}: {error}", file=sys.stderr, flush=True)
        return EXIT_RESTART
    except Exception as error:  # the edge of the process: the traceback goes to the log, one line to the screen
        log.exception("internal fault")
        if not log.hasHandlers():
            traceback.print_exc()
        print(f"gyre: rank {context.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAULT


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gyre.supervisor", description="Supervise one rank; started by gyre.rank.")
    parser.add_argument("run_dir", help="the run's directory")
    sys.exit(main(parser.parse_args().run_dir))
