"""A cell's supervisor: an engine and a trainer that stay alive across role changes and hand memory to each other.

Orders come from the scheduler, one after the other, each with the epoch it belongs to; an order of an epoch that has
passed is ignored. Every state of the cell's machine that is entered is reported. The order of the steps inside a move
is the safety argument of docs/architecture.md: the gate closes and reports zero before any memory is released, and
routes are published (by the scheduler, on the report of ROLLOUT) after the weights are verified.

A standalone engine is the same without a trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre import models
from gyre.attempt import RankContext
from gyre.cell.effort import Effort
from gyre.cell.engine_client import EngineProcess
from gyre.cell.machine import Machine, State
from gyre.cell.settings import engine_settings
from gyre.cell.trainer_client import start_trainer
from gyre.cell.weights import load_snapshot
from gyre.child import Child, kill_group
from gyre.errors import ChildFailed, GyreError, IllegalTransition, WeightsMismatch
from gyre.events import (
    CellJoined,
    Event,
    GroupsBuilt,
    PolicyCommitted,
    RankReady,
    RoleReached,
    TrainingEnded,
    UpdateDone,
    UpdateOpened,
)
from gyre.status import RankStatus

log = logging.getLogger(__name__)

ORDER_POLL_SECONDS = 0.02
STATUS_SECONDS = 1.0
#: A child that fails a call because it dies is known to be dead after this time.
DEATH_SECONDS = 1.0
#: Longer than any operation of a trainer but an update takes; one that takes more hangs.
OPERATION_SECONDS = 3600.0
#: An engine that has requests but samples nothing for this long hangs.
STALL_SECONDS = 900.0
Order = dict[str, Any]


class CellSupervisor:
    """Carries out the scheduler's orders on one cell."""

    def __init__(self, context: RankContext, report: Callable[[Event], None]) -> None:
        self._context = context
        self._report = report
        self._kind = context.kind(context.rank)
        self._machine = Machine(State.RESTARTING)
        self._epoch = 0
        self._entered = time.time()
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._model = Path()
        self._engine: EngineProcess | None = None
        self._trainer: Child | None = None
        self._awake = True  # the engine holds its memory
        self._engine_up = asyncio.Event()
        self._engine_needed = asyncio.Event()  # the trainer is parked, and rollout comes next
        self._checksum = ""  # of the weights the core began with
        self._effort = Effort()
        self._status = RankStatus(
            rank=context.rank,
            kind=self._kind,
            incarnation=context.incarnation,
            node=context.identity.node,
            since=self._entered,
            doing="starting",
        )

    # -- life --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start engine and trainer (side by side on a CPU), and report that the cell is ready."""
        self._status.doing = "preparing the model"
        config = self._context.config
        self._model = await asyncio.to_thread(models.resolve, config.model.path, self._progress, config.root)
        if config.cells.gpus:  # an engine takes the memory that it finds free, and a started trainer is parked
            await self._start_trainer()
            await self._start_engine()
        else:
            await asyncio.gather(self._start_engine(), self._start_trainer())
        self._status.doing = "ready"
        self._report_ready()

    def _report_ready(self) -> None:
        context = self._context
        self._report(
            RankReady(
                context.rank,
                context.incarnation,
                context.identity.node,
                self._engine.url,
                self._checksum,
                self._engine.kv,
            )
        )

    def _progress(self, text: str, fraction: float | None = None) -> None:
        self._status.doing, self._status.fraction = text, fraction

    async def _start_engine(self) -> None:
        context = self._context
        self._engine = await EngineProcess.start(engine_settings(context, self._model), context.log("engine"))
        await self._engine.ready(context.config.engine.start_timeout, lambda what: self._progress(f"engine: {what}"))
        self._awake = True
        self._engine_up.set()

    async def _start_trainer(self) -> None:
        if self._kind == "standalone":
            return
        self._checksum = await start_trainer(self._context, self._model, self._on_trainer_event, self._take_trainer)

    def _take_trainer(self, trainer: Child) -> None:
        self._trainer = trainer

    async def run(self) -> None:
        """Take orders until cancelled; raises `ChildFailed` when the trainer dies: its state cannot be rebuilt here."""
        tasks = [
            asyncio.create_task(self._poll_orders()),
            asyncio.create_task(self._work()),
            asyncio.create_task(self._watch_engine()),
            asyncio.create_task(self._refresh_status()),
        ]
        if self._trainer:
            tasks.append(asyncio.create_task(self._watch_trainer(self._trainer)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End engine and trainer."""
        ending = [child.stop() for child in (self._engine, self._trainer) if child is not None]
        await asyncio.gather(*ending, return_exceptions=True)

    def status(self) -> RankStatus:
        """What the cell is doing, for people."""
        return self._status

    async def _watch_trainer(self, trainer: Child) -> None:
        code = await trainer.wait()
        raise ChildFailed(f"the trainer ended with {code}; see {self._context.log('trainer')}")

    async def _watch_engine(self) -> None:
        """Restart an engine that died; it serves nobody before the scheduler has ordered it to the current weights.

        While the cell trains, the device memory is the trainer's: the engine comes back when it is needed.
        """
        while True:
            code = await self._engine.wait()
            self._engine_up.clear()
            log.error("the engine ended with %s; see %s", code, self._engine.log_path)
            if self._machine.state is State.TRAINING:
                await self._engine_needed.wait()
            else:
                self._enter(State.FAILED, f"the engine ended with {code}")
                self._enter(State.RESTARTING)
                if self._trainer:
                    await self._trainer.call("park", OPERATION_SECONDS)
            await self._engine.stop()
            await self._start_engine()
            if self._machine.state is State.RESTARTING:
                self._report_ready()

    async def _refresh_status(self) -> None:
        """Follow the engine's own numbers; one that has work but samples nothing is ended, and so replaced."""
        tokens, moved = -1, time.monotonic()
        while True:
            with contextlib.suppress(ChildFailed):
                seen = await self._engine.status()
                self._status.live = seen["live"]
                self._status.serving_seconds = seen["busy_seconds"]
                self._status.tokens = seen["tokens"]
                if seen["tokens"] != tokens or not seen["live"]:
                    tokens, moved = seen["tokens"], time.monotonic()
            self._status.training_seconds = self._effort.seconds
            self._status.trained_tokens = self._effort.tokens
            if time.monotonic() - moved > STALL_SECONDS and self._engine_up.is_set():
                log.error("the engine has sampled nothing for %g s; ending it", STALL_SECONDS)
                moved = time.monotonic()
                kill_group(self._engine.pid)
            await asyncio.sleep(STATUS_SECONDS)

    # -- orders ------------------------------------------------------------------------------------------------------
    async def _poll_orders(self) -> None:
        context = self._context
        inbox = context.store.inbox(f"orders/{context.rank}/{context.incarnation}")
        while True:
            for order in inbox.read():
                match order["order"]:  # some do not wait for the present order to end
                    case "closed":
                        await self._refuse(order["n"])
                    case "leave":
                        raise ChildFailed(f"the scheduler counts this incarnation of rank {context.rank} as lost")
                    case _:
                        self._orders.put_nowait(order)
            await asyncio.sleep(ORDER_POLL_SECONDS)

    async def _refuse(self, executions: list[int]) -> None:
        """Have the gate refuse requests of closed executions; an engine that is down has none to refuse."""
        with contextlib.suppress(ChildFailed):
            await self._engine.closed(executions)

    async def _work(self) -> None:
        """Carry out orders in their order; a train order takes as long as its update."""
        while True:
            order = await self._orders.get()
            if order["epoch"] < self._epoch:
                log.info("ignored an order of epoch %s in epoch %s: %s", order["epoch"], self._epoch, order)
                continue
            self._epoch = order["epoch"]
            if order["order"] in ("role", "sync") and self._machine.state in (State.FAILED, State.RESTARTING):
                if not self._engine_up.is_set():  # another one will follow when the scheduler hears that it is back
                    log.info("ignored an order to an engine that is down: %s", order)
                    continue
            engine = self._engine
            try:
                await self._obey(order)
            except WeightsMismatch as error:
                self._enter(State.FAILED, str(error))
                raise
            except (ChildFailed, IllegalTransition) as error:
                # A dead child is its watcher's business, who has moved the machine on; whoever waits for this order
                # hears of the failure.
                log.error("order failed: %s: %s", order, error)
                if not await self._lost(engine):
                    raise

    async def _lost(self, engine: EngineProcess) -> bool:
        """Whether an engine that failed an operation, or is no longer where its order left it, is dead or replaced."""
        await asyncio.sleep(DEATH_SECONDS)
        return engine is not self._engine or not engine.alive

    async def _obey(self, order: Order) -> None:
        match order["order"]:
            case "role" if order["target"] == "training":
                await self._to_training()
            case "role":
                await self._to_rollout(order["version"], order["snapshot"])
            case "sync":
                await self._sync(order["version"], order["snapshot"])
            case "train":
                await self._train(order)
            case "commit":
                await self._commit(order)
            case "groups":
                await self._build_groups(order["generation"], order["ranks"])
            case unknown:
                raise GyreError(f"unknown order {unknown!r}")

    async def _held(self) -> dict[str, int]:
        """Bytes that engine and trainer hold, by what for: the proof that a move handed the memory over."""
        held = {f"engine_{name}": size for name, size in (await self._engine.memory())["bytes"].items()}
        if self._trainer:
            trainer = await self._trainer.call("memory", OPERATION_SECONDS)
            names = ("weights", "gradients", "accumulators", "optimizer")
            held |= {f"trainer_{name}": trainer[name] for name in names}
        return held

    def _enter(self, state: State, detail: str = "", version: int = -1, held: dict[str, int] | None = None) -> None:
        """Enter a state of the machine and report it with the time spent in the one before."""
        self._machine.enter(state)
        now = time.time()
        seconds, self._entered = now - self._entered, now
        context = self._context
        self._status.state, self._status.since, self._status.fraction = state.value, now, None
        self._status.doing = detail or state.value.lower()
        self._report(
            RoleReached(
                context.rank, context.incarnation, self._epoch, state.value, seconds, version, detail, held or {}
            )
        )

    async def _to_training(self) -> None:
        self._enter(State.DRAINING)
        await self._engine.close()
        if self._engine.kv is not None:
            await self._hand_off()
        self._enter(State.RELEASING)
        await self._engine.sleep()
        self._awake = False
        await self._trainer.call("wake", OPERATION_SECONDS)
        self._enter(State.TRAINING, held=await self._held())

    async def _hand_off(self) -> None:
        """Have the engine copy its KV blocks out. What fails costs the others a computation and nothing else.

        Raises:
            ChildFailed: the engine died meanwhile; then the move is over, and the machine elsewhere.
        """
        self._enter(State.HANDOFF)
        engine = self._engine
        try:
            self._status.doing = "copying KV blocks out"
            answer = await engine.export()
            log.info("handed off %(blocks)d KV blocks, %(bytes)d bytes, in %(seconds).3f s", answer)
        except ChildFailed as error:
            log.warning("no KV is handed off: %s", error)
            if await self._lost(engine) or self._machine.state is not State.HANDOFF:
                raise

    async def _to_rollout(self, version: int, snapshot: int) -> None:
        if self._machine.state is State.ROLLOUT:  # a later order found it there already
            await self._engine.hold()
            await load_snapshot(self._context, self._engine, snapshot)
        else:
            await self._restore()
            self._enter(State.SYNCING)
            await load_snapshot(self._context, self._engine, snapshot)
            if not self._awake:
                await self._engine.wake(["kv_cache"])
                self._awake = True
        await self._engine.open(self._epoch, version)
        self._status.version = version
        self._enter(State.ROLLOUT, "serving", version, await self._held())

    async def _restore(self) -> None:
        """Take the device memory from the trainer and give the engine what its weights need."""
        if self._machine.state is State.TRAINING:
            self._enter(State.RESTORING)
            await self._trainer.call("park", OPERATION_SECONDS)
            self._engine_needed.set()
            await self._engine_up.wait()
            self._engine_needed.clear()
        if not self._awake:
            await self._engine.wake(["weights"])

    async def _sync(self, version: int, snapshot: int) -> None:
        """Bring a serving engine to a new policy version: hold, load, verify, admit."""
        context = self._context
        self._status.doing = f"loading policy {version}"
        await self._engine.hold()
        await load_snapshot(self._context, self._engine, snapshot)
        await self._engine.admit(version)
        self._status.version, self._status.doing = version, "serving"
        self._report(
            RoleReached(context.rank, context.incarnation, self._epoch, State.ROLLOUT.value, 0.0, version, "synced")
        )

    # -- training ----------------------------------------------------------------------------------------------------
    def _on_trainer_event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "opened":
                self._report(UpdateOpened(event["update"]))
            case "joined":
                self._report(CellJoined(self._context.rank, event["update"], event["position"]))
            case "progress" | "stage":
                self._effort.take(event, time.monotonic())
                self._status.doing = self._effort.text
                self._status.micro_steps = self._effort.micro_steps

    async def _train(self, order: Order) -> None:
        """Take part in an update to its end, a suspension included."""
        context, update = self._context, order["update"]
        self._status.doing = f"update {update}"
        answer = await self._trainer.call(
            "train",
            update=update,
            position=order["position"],
            generation=order["generation"],
            members=order["members"],
        )
        self._effort.end(time.monotonic())
        self._status.doing = "waiting"
        if answer["how"] == "done" and context.rank == 0:
            self._report(
                UpdateDone(update, answer["members"], answer["micro_steps"], answer["seconds"], answer["metrics"])
            )
        self._report(TrainingEnded(context.rank, context.incarnation, update, answer["how"], answer.get("detail", "")))

    async def _commit(self, order: Order) -> None:
        begun = time.time()
        self._status.doing = f"committing policy {order['version']}"
        answer = await self._trainer.call(
            "commit", OPERATION_SECONDS, version=order["version"], update=order["update"], cursor=order["cursor"]
        )
        self._status.doing = "waiting"
        self._report(PolicyCommitted(order["version"], answer["checksum"], time.time() - begun))

    async def _build_groups(self, generation: int, ranks: list[int]) -> None:
        await self._trainer.call("groups", OPERATION_SECONDS, generation=generation, ranks=ranks)
        self._report(GroupsBuilt(self._context.rank, self._context.incarnation, generation))
