"""The scheduler's side of a KV handoff, driven as vLLM's scheduler drives it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from gyre.cell import kv_scheduler
from gyre.cell.engine import kv_flags
from gyre.cell.kv_connector import demand_whole_prefixes
from gyre.cell.kv_index import Match
from gyre.cell.kv_scheduler import KEY_VARIABLE, SchedulerSide
from gyre.cell.kv_segment import Plan, Unavailable, fresh_tag, nameless
from gyre.cell.kv_source import Source
from gyre.cell.kv_transport import Address, Found
from gyre.errors import UserError

SIZE, SECRET = 4, "run's key"


class Pool:
    """vLLM's blocks, as far as they are touched."""

    def __init__(self, count: int) -> None:
        self.blocks = list(range(count))
        self.held: list[int] = []
        self.evicted: set[int] = set()

    def touch(self, blocks):
        self.held += blocks

    def free_blocks(self, blocks):
        for block in blocks:
            self.held.remove(block)

    def evict_blocks(self, blocks):
        self.evicted |= blocks


class Searching:
    """A search whose answer is set from outside."""

    def __init__(self) -> None:
        self.answer: Found | Exception | None = None
        self.closed = False
        self.polls = 0

    def poll(self, now):
        self.polls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def wait(self, seconds):
        pass

    def close(self):
        self.closed = True


class Side:
    """A scheduler's side on a page of its own, with searches of ours."""

    def __init__(self) -> None:
        self.source = Source(SECRET, 30.0)
        self.source.serve(3, 1)
        spec = SimpleNamespace(block_size=SIZE)
        group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
        tensors = [SimpleNamespace(size=16 * 64)]
        kv = SimpleNamespace(kv_cache_groups=[group], num_blocks=16, kv_cache_tensors=tensors)
        parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1)
        extra = {"page": self.source.path, "transport": "shared", "limit": 1 << 20}
        config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(model="toy", dtype="float32"),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        )
        self.side = SchedulerSide(config, kv)
        self.pool = Pool(16)
        self.side.bind(self.pool)
        self.searches: list[Searching] = []
        self.side._transport = SimpleNamespace(search=self._search)

    def _search(self, *_):
        self.searches.append(Searching())
        return self.searches[-1]

    def request(self, name: str, tokens: list[int], handoff: bool = True):
        address = Address("0-1", 1, 1, b"t" * 16, "http://127.0.0.1:1").encode(SECRET)
        parameters = {"gyre": {"address": address, "epoch": 1, "policy": 1}} if handoff else None
        request = SimpleNamespace(
            request_id=name,
            lora_request=None,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
            prompt_token_ids=tokens,
            all_token_ids=tokens,
            num_tokens=len(tokens),
            num_computed_tokens=0,
            kv_transfer_params=parameters,
            status=RequestStatus.RUNNING,
        )
        self.side.added(request)
        return request

    def step(self, request, blocks: list[int], computed: int, resumed: bool = False):
        """Schedule a request that gets `blocks`, of which the first hold `computed` tokens; returns the loads."""
        cached, new = CachedRequestData.make_empty(), []
        if resumed:
            cached.req_ids.append(request.request_id)
            cached.resumed_req_ids.add(request.request_id)
            cached.new_block_ids.append((blocks,))
            cached.num_computed_tokens.append(computed)
        else:
            data = {"prompt_token_ids": None, "mm_features": [], "sampling_params": None, "pooling_params": None}
            new.append(
                NewRequestData(
                    request.request_id, block_ids=(blocks,), num_computed_tokens=computed, lora_request=None, **data
                )
            )
        request.num_computed_tokens = request.num_tokens
        return self.side.scheduled(SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached))

    def load(self, request, blocks: list[int]):
        """Have a request load all that it may."""
        self.side.matched(request, 0)
        self.searches[-1].answer = found = self.found(request)
        count = self.side.matched(request, 0)
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), count)
        return found, self.step(request, blocks, count)

    def found(self, request) -> Found:
        slots = tuple(range(-(-request.num_tokens // SIZE)))
        wanted = SimpleNamespace(policy=1)
        return Found(wanted, ("/x",), Match(slots, request.num_tokens), 1, fresh_tag(), [nameless("kv-fetched")])

    @property
    def known(self) -> set[int]:
        return set(self.side._ledger._entries)


@pytest.fixture
def one(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    one = Side()
    yield one
    one.source.close()
    one.side._clear()
    one.side._page_memory.close()
    left = [name for n in os.listdir("/proc/self/fd") if "memfd:gyre-kv" in (name := target(n))]
    assert left == []


def target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_what_was_loaded_is_loaded_once_and_let_go(one):
    request = one.request("a", list(range(14)))
    found, loads = one.load(request, [1, 2, 3, 4])
    assert [load.pairs for load in loads] == [[(1, 0), (2, 1), (3, 2), (4, 3)]] and loads[0].tag == found.tag
    one.side.computed(set())
    one.side.computed(set())
    assert not found._own, "its descriptors are open after the load"
    assert one.side.matched(request, 0) == 0, "after a preemption it is computed"
    assert one.step(request, [5, 6, 7, 8], 0, resumed=True) == [] and len(one.searches) == 1
    one.side.finished(request, [5, 6, 7, 8])


def test_descriptors_stay_open_while_a_worker_may_still_open_them(one):
    request = one.request("a", list(range(14)))
    found, _ = one.load(request, [1, 2, 3, 4])
    one.side.finished(request, [1, 2, 3, 4])  # its client left while the step is on its way
    assert found._own
    one.side.computed(set())
    one.side.computed(set())
    assert not found._own


def test_a_load_that_failed_costs_the_others_nothing(one):
    other = one.request("other", [50 + n for n in range(12)], handoff=False)
    one.step(other, [9, 10, 11], 0)
    other.num_computed_tokens = 12
    one.side._note(one.side._tracked["other"])
    request = one.request("a", list(range(14)))
    one.load(request, [1, 2, 3, 4])
    request.num_computed_tokens = SIZE  # vLLM computes what comes behind the first block
    one.side.computed({2})
    assert one.known == {9, 10, 11, 1}
    assert one.pool.evicted == {2, 3, 4}, "others would take them for computed"
    request.num_computed_tokens = 14
    one.side._note(one.side._tracked["a"])
    assert one.known == {9, 10, 11, 1, 2, 3}, "they are computed now"


def test_nothing_is_offered_of_a_request_that_ended_in_the_step_in_which_its_load_failed(one):
    request = one.request("a", list(range(14)))
    one.load(request, [1, 2, 3, 4])
    request.status = RequestStatus.FINISHED_ABORTED
    one.side.finished(request, [1, 2, 3, 4])
    one.side.computed({1, 2, 3, 4})
    assert one.known == set() and one.pool.evicted == {1, 2, 3, 4}


def test_a_request_that_waits_too_long_computes(one, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(kv_scheduler.time, "monotonic", lambda: now[0])
    request = one.request("a", list(range(14)))
    assert one.side.matched(request, 0) is None
    now[0] += kv_scheduler.LONGEST_SECONDS - 1
    assert one.side.matched(request, 0) is None
    now[0] += 2
    assert one.side.matched(request, 0) == 0 and one.searches[0].closed
    assert one.side.matched(request, 0) == 0 and one.searches[0].polls == 3


@pytest.mark.parametrize("fault", [Unavailable("gone"), ValueError("nonsense")])
def test_whatever_a_search_meets_the_request_computes(one, fault):
    request = one.request("a", list(range(14)))
    one.side.matched(request, 0)
    one.searches[0].answer = fault
    assert one.side.matched(request, 0) == 0
    assert one.side.matched(request, 0) == 0 and one.searches[0].polls == 2


def test_what_is_pinned_is_free_when_the_plan_fails(one, monkeypatch):
    request = one.request("a", list(range(14)), handoff=False)
    one.step(request, [1, 2, 3, 4], 0)
    one.source.pin()
    request.status = RequestStatus.FINISHED_ABORTED
    one.side.finished(request, [1, 2, 3, 4])
    assert sorted(one.pool.held) == [1, 2, 3, 4]
    monkeypatch.setattr(Plan, "pack", lambda self: 1 / 0)
    monkeypatch.setattr(one.side, "_page", lambda: SimpleNamespace(stage=kv_scheduler.Stage.EXPORTING, plan=0))
    with pytest.raises(ZeroDivisionError):
        one.side.reset()
    assert one.pool.held == []


def test_a_place_without_a_block_is_no_block(one):
    request = one.request("a", list(range(16)), handoff=False)
    one.step(request, [0, 0, 7, 8], 12)
    assert 0 not in one.known


def test_caches_that_forget_are_refused():
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": __import__("torch").float32}
    whole, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)

    def config(*specs):
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])

    demand_whole_prefixes(config(whole))
    for refused in ((window,), (whole, whole)):
        with pytest.raises(ValueError, match="set serving.kv_handoff=false"):
            demand_whole_prefixes(config(*refused))


def test_no_step_is_scheduled_on_a_token_that_a_failed_load_takes_back(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    settings = SimpleNamespace(args={}, secret=SECRET, kv={"transport": "auto", "limit": 1, "timeout": 1.0})
    source = SimpleNamespace(path="/proc/1/fd/1")
    assert "--no-async-scheduling" in kv_flags(settings, source)
    settings.args = {"async_scheduling": True}
    with pytest.raises(UserError, match="remove one of them"):
        kv_flags(settings, source)
