"""The scheduler's side of a KV handoff: what every block holds, what is pinned and planned, and what is to be loaded.

Blocks that are loaded go over in the step that first computes their request; a load that fails is reported to vLLM,
which has the blocks computed instead.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from gyre.cell.kv_auto import transport
from gyre.cell.kv_index import ROOT, Entry, Ledger, extend
from gyre.cell.kv_segment import Page, Plan, Stage, Unavailable, path_of
from gyre.cell.kv_transport import Found, Kind, Search, Wanted
from gyre.cell.kv_worker import Load

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("gyre.engine.kv")
log.setLevel(logging.INFO)  # whatever vLLM makes of the root

#: Environment variable with the run's key: vLLM prints its settings, so it is none of them.
KEY_VARIABLE = "GYRE_KV_KEY"
#: Seconds that an engine with nothing to compute lets pass between two looks at a search.
IDLE_SECONDS = 0.005
#: Seconds after which a request computes what it waits for, whatever the transport says.
LONGEST_SECONDS = 15.0


@dataclass
class _Tracked:
    """A request whose blocks are followed: the keys of its full blocks, and how many of them are in the ledger."""

    request: Request
    table: list[int]
    chain: list[bytes] = field(default_factory=list)
    noted: int = 0


@dataclass
class _Looking:
    """A search for a request's prefix; `since` is on the clock that does not jump."""

    search: Search
    since: float


@dataclass
class _Loading:
    """What was found, on its way into `blocks`, all of the request's; dropped when so many more `steps` are over."""

    found: Found
    blocks: list[int]
    steps: int


def _plain(request: Request) -> bool:
    """Whether nothing but its tokens decides what a request's blocks hold."""
    odd = (request.lora_request, request.mm_features, request.cache_salt, request.prompt_embeds)
    return not any(each is not None and each != [] for each in odd) and request.prompt_token_ids is not None


def _model(config: VllmConfig, kv: KVCacheConfig) -> bytes:
    """What two engines must have in common for one to use the other's blocks."""
    parallel, (group,) = config.parallel_config, kv.kv_cache_groups
    parts = (
        config.model_config.model,
        str(config.model_config.dtype),
        config.cache_config.cache_dtype,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        sorted(group.layer_names),
        repr(group.kv_cache_spec),
    )
    return blake2b(repr(parts).encode(), digest_size=16).digest()


class SchedulerSide:
    """The side that knows requests and blocks."""

    def __init__(self, config: VllmConfig, kv: KVCacheConfig) -> None:
        extra = config.kv_transfer_config.kv_connector_extra_config
        with open(extra["page"], "rb") as file:
            self._page_memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._pid = int(extra["page"].split("/")[2])
        self._secret = os.environ[KEY_VARIABLE]
        self._size = kv.kv_cache_groups[0].kv_cache_spec.block_size
        self._model = _model(config, kv)
        world = config.parallel_config.world_size
        block_bytes = sum(tensor.size for tensor in kv.kv_cache_tensors) // kv.num_blocks * world
        self._limit = extra["limit"] // max(1, block_bytes)
        self._transport = transport(extra["transport"], self._secret, extra["limit"])
        self._ledger = Ledger()
        self._turn = -1
        self._pool: BlockPool | None = None
        self._pinned: list[int] = []
        self._requests: dict[str, Request] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._searches: dict[str, _Looking] = {}
        self._found: dict[str, Found] = {}
        self._settled: set[str] = set()  # requests that look no more: they have loaded, or compute
        self._loads: list[Load] = []
        self._loading: dict[str, _Loading] = {}
        self._under_way = config.parallel_config.pipeline_parallel_size + 1  # steps, at most

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's blocks over."""
        self._pool = pool

    def _page(self) -> Page:
        """This engine's page; what the ledger knew is of no use after the gate opened anew."""
        page = Page.unpack(self._page_memory)
        if page.turn != self._turn:
            self._turn = page.turn
            self._clear()
        return page

    def _clear(self) -> None:
        self._ledger.clear()
        self._unpin()
        while self._loading:
            self._loading.popitem()[1].found.close()

    # -- what blocks hold --------------------------------------------------------------------------------------------
    def added(self, request: Request) -> None:
        """A request came."""
        self._page()
        self._requests[request.request_id] = request

    def scheduled(self, output: SchedulerOutput) -> list[Load]:
        """Follow the blocks of a step, which is about to be computed; returns what is to be loaded in it."""
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids[0], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self._begin(name, blocks[0] if blocks else [], cached.num_computed_tokens[index])
                continue
            if blocks is not None:
                self._ledger.drop(blocks[0])
            if (tracked := self._tracked.get(name)) is not None:
                if blocks is not None:
                    tracked.table.extend(blocks[0])
                self._note(tracked)
        loads, self._loads = self._loads, []
        return loads

    def _begin(self, name: str, blocks: list[int], computed: int) -> None:
        """A request gets its blocks, the first of which hold the `computed` tokens it starts behind."""
        request, full = self._requests.get(name), computed // self._size
        self._ledger.drop(blocks[full:])
        if request is None or not _plain(request):
            return
        tracked = self._tracked[name] = _Tracked(request, list(blocks))
        self._hold(tracked, full * self._size)

    def _note(self, tracked: _Tracked) -> None:
        """Enter what earlier steps have filled: of a step on its way it is not known what will stand."""
        request = tracked.request
        self._hold(tracked, min(request.num_computed_tokens, request.num_tokens))

    def _hold(self, tracked: _Tracked, count: int) -> None:
        if count // self._size <= tracked.noted:
            return
        extend(tracked.chain, tracked.request.all_token_ids, self._size, count)
        for index in range(tracked.noted, min(len(tracked.chain), len(tracked.table))):
            if not tracked.table[index]:  # vLLM's word for no block at all
                continue
            parent = tracked.chain[index - 1] if index else ROOT
            tokens = tracked.request.all_token_ids[index * self._size : (index + 1) * self._size]
            self._ledger.hold(tracked.table[index], Entry(tracked.chain[index], parent, array("i", tokens)))
        tracked.noted = len(tracked.chain)

    def finished(self, request: Request, blocks: list[int]) -> None:
        """A request ends: enter its last block, and keep its blocks from others if they are to be handed off."""
        name = request.request_id
        self._requests.pop(name, None)
        self._forget(name)
        self._settled.discard(name)
        page = self._page()
        if (tracked := self._tracked.pop(name, None)) is not None:
            tracked.table = list(blocks)
            count = min(request.num_computed_tokens, request.num_tokens)
            self._hold(tracked, count)
            full, rest = divmod(count, self._size)
            if rest and full < len(blocks) and full == len(tracked.chain):
                parent = tracked.chain[-1] if tracked.chain else ROOT
                self._ledger.hold(blocks[full], Entry.of(parent, request.all_token_ids[full * self._size : count]))
        if page.stage is Stage.PINNING and request.status is RequestStatus.FINISHED_ABORTED and self._pool is not None:
            self._pool.touch([self._pool.blocks[block] for block in blocks])
            self._pinned += blocks

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, []
        if pinned and self._pool is not None:
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(pinned)])

    def computed(self, failed: set[int]) -> None:
        """A step is over. Where blocks could not be loaded, nothing is known of what was computed behind them."""
        if failed:
            self._distrust(failed)
        for name, loading in list(self._loading.items()):
            loading.steps -= 1
            if not loading.steps:
                del self._loading[name]
                loading.found.close()

    def _distrust(self, failed: set[int]) -> None:
        """Forget what requests with one of these blocks hold from there on.

        vLLM has it computed, but goes on to offer it to others in the meantime, and for good if the request ends first.
        """
        doubtful = set(failed)
        for loading in self._loading.values():
            doubtful.update(_behind(loading.blocks, failed))
        for name, tracked in list(self._tracked.items()):
            if behind := _behind(tracked.table, failed):
                doubtful.update(behind)
                sound = len(tracked.table) - len(behind)
                tracked.noted = min(tracked.noted, sound)
                del tracked.chain[sound:]
                if tracked.request.num_computed_tokens > sound * self._size:  # it counts on another's computing
                    del self._tracked[name]
        self._ledger.drop(doubtful)
        if self._pool is not None:
            self._pool.evict_blocks(doubtful)

    def reset(self) -> None:
        """The prefix cache is emptied; during an export, say first what was in it."""
        try:
            page = self._page()
            if page.stage is Stage.EXPORTING and page.plan >= 0:
                plan = Plan(self._model, self._size, self._ledger.plan(self._limit))
                with open(path_of(self._pid, page.plan), "wb") as file:
                    file.write(plan.pack())
        finally:
            self._clear()

    # -- what comes from elsewhere -----------------------------------------------------------------------------------
    def matched(self, request: Request, computed: int) -> int | None:
        """Tokens behind the first `computed` that another engine left; None while that is not known."""
        name = request.request_id
        parameters = (request.kv_transfer_params or {}).get("gyre")
        if parameters is None or name in self._settled or not _plain(request):
            return 0
        try:
            found = self._found.get(name) or self._search(request, parameters)
        except Unavailable as error:
            log.info("request %s computes what it needs: %s", name, error)
        except Exception:  # no fault of a handoff may end an engine
            log.exception("request %s computes what it needs", name)
        else:
            if found is None:
                return None
            self._found[name] = found
            return max(0, min(found.tokens, request.num_tokens - 1) - computed)
        self._settle(name)
        return 0

    def _search(self, request: Request, parameters: Any) -> Found | None:
        name, now = request.request_id, time.monotonic()
        if name not in self._searches:
            wanted = Wanted.of(parameters, self._secret)
            page = self._page()
            if page.stage is not Stage.SERVING or page.policy != wanted.policy:
                raise Unavailable(f"policy {page.policy} is served here, not {wanted.policy}")
            kind = Kind(self._model, self._size)
            self._searches[name] = _Looking(self._transport.search(wanted, request.all_token_ids[:], kind), now)
        looking = self._searches[name]
        found = looking.search.poll(now)
        if found is None and now - looking.since > LONGEST_SECONDS:
            raise Unavailable(f"nothing was found in {LONGEST_SECONDS:g} s")
        if found is not None:
            del self._searches[name]  # what it found is the request's now
        elif not self._tracked:  # vLLM would ask again and again, and keep the answer from coming
            looking.search.wait(IDLE_SECONDS)
        return found

    def allocated(self, request: Request, blocks: KVCacheBlocks, count: int) -> None:
        """A request got blocks, and `count` tokens behind what it has are to be loaded: once, and never again."""
        name = request.request_id
        if (found := self._found.get(name)) is None:
            return
        if count:
            last = min(found.tokens, request.num_tokens - 1)
            first, end = (last - count) // self._size, math.ceil(last / self._size)
            table = list(blocks.get_block_ids()[0])
            pairs = list(zip(table[first:end], found.slots[first:end], strict=True))
            self._loads.append(Load(found.generation, found.policy, found.tag, found.shards, pairs))
            del self._found[name]
            self._loading[name] = _Loading(found, table, self._under_way)
        self._settle(name)

    def _settle(self, name: str) -> None:
        """A request looks no more."""
        self._forget(name)
        self._settled.add(name)

    def _forget(self, name: str) -> None:
        if (looking := self._searches.pop(name, None)) is not None:
            looking.search.close()
        if (found := self._found.pop(name, None)) is not None:
            found.close()


def _behind(table: list[int], failed: set[int]) -> list[int]:
    """A request's blocks from the first that failed on."""
    return next((table[index:] for index, block in enumerate(table) if block in failed), [])
