"""Roles change at random under 64 conversations, and no client notices (invariants 6 and 7).

Every request has exactly one complete answer: at its client, in the proxy's counts and in the records. What is greedy
equals an uninterrupted run up to the first step at which the two best tokens are within `TIE`; log-probabilities agree
within `CLOSE`, those of sampled answers with transformers'.
"""

import asyncio
import json
import os
import random
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
import psutil
import pytest

from gyre.proxy.recorder import CallRecord
from tests.whole.chaos import MAX_CONTEXT, SECRET, World
from tests.whole.chaos_clients import Client, Told

CONVERSATIONS, TURNS = 64, 4
TIE = CLOSE = 1e-4
COMPARED = 500  # answers with an uninterrupted run each, those that moved first, and as many with transformers


@dataclass
class Harvest:
    """All answers with their records, and the sum of the proxy's counts."""

    answers: list[tuple[Told, CallRecord]] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    requests: int = 0


async def converse(world: World, session: aiohttp.ClientSession, seed: int, harvest: Harvest, until: float) -> None:
    """One conversation after the other, each an execution, until the time is over; then the last one ends."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        n = await world.register()
        client, told = Client(session, world.url, f"token-{n}", rng), []
        for _ in range(rng.randint(2, TURNS)):
            told.append(await client.turn())
            if time.monotonic() > until:
                break
        counts, records = await world.close(n)
        settle(n, told, counts, records, harvest)


def settle(n: int, told: list[list[Told]], counts: dict, records: list[CallRecord], harvest: Harvest) -> None:
    """Client, counts and records of an execution tell the same."""
    assert counts["requests"] == counts["answered"] == len(told), f"execution {n}: {counts}"
    assert not counts["lost"] and not counts["abandoned"] and not counts["refused"], f"execution {n}: {counts}"
    flat = [one for choices in told for one in choices]
    assert len(records) == len(flat), f"execution {n}: {len(records)} records of {len(flat)} answers"
    for one, record in zip(flat, records, strict=True):
        assert list(record.sampled) == one.tokens, f"execution {n}: the record is not what the client was told"
        assert record.logprobs == array("f", one.logprobs), f"execution {n}: log-probabilities differ"
        assert one.prompt is None or list(record.prompt) == one.prompt
        assert record.finish_reason == one.finish
        assert sum(span.tokens for span in record.spans) == len(record.sampled)
        harvest.answers.append((one, record))
    first = [records[sum(map(len, told[:turn]))] for turn in range(len(told))]  # a client goes on from its first choice
    for before, after in pairwise(first):
        if after.spliced:
            assert after.prompt[: len(before.prompt) + len(before.sampled)] == before.prompt + before.sampled
    for choices in told:
        if usage := choices[0].usage:
            assert usage["completion_tokens"] == sum(len(one.tokens) for one in choices)
    harvest.requests += len(told)
    harvest.counts.update({key: value for key, value in counts.items() if isinstance(value, int)})


async def chaos(world: World, seconds: float, crashes: int) -> Harvest:
    """Conversations under a driver for each engine; the driver ends after the last conversation has."""
    harvest, now = Harvest(), asyncio.get_running_loop().time()
    until = time.monotonic() + seconds
    at = [now + seconds * (i + 0.5) / crashes for i in range(crashes)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        asked = [
            asyncio.create_task(converse(world, session, i, harvest, until), name=f"conversation {i}")
            for i in range(CONVERSATIONS)
        ]
        driving = [asyncio.create_task(world.drive(rank, at), name=f"driver {rank}") for rank in world.ranks]
        try:
            pending = set(asked)
            while pending:
                done, _ = await asyncio.wait([*pending, *driving], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                pending -= done
            world.over = True
            await asyncio.gather(*driving)
        finally:
            for task in (*asked, *driving):
                task.cancel()
            await asyncio.gather(*asked, *driving, return_exceptions=True)
    totals = await world.proxy.call("totals", 60)
    assert not any(totals[name] for name in ("executions", "requests", "held")), totals
    return harvest


def chosen(answers: Iterable[tuple[Told, CallRecord]]) -> list[tuple[Told, CallRecord]]:
    """The answers to compare: those that took most engines first, then the others in their order."""
    return sorted(answers, key=lambda pair: -len(pair[1].spans))[:COMPARED]


# -- the uninterrupted run --------------------------------------------------------------------------------------------
async def uninterrupted(world: World, answers: list[tuple[Told, CallRecord]]) -> list[dict]:
    """What one engine by itself says to the same prompts: {tokens, logprobs, gaps, text, finish} of each."""
    url, room = world.engines[0].url + "/v1/completions", asyncio.Semaphore(24)
    headers = {"Authorization": f"Bearer {SECRET}", "X-Gyre-Execution": "0", "X-Gyre-Epoch": str(world.epochs[0])}

    async def answer(session: aiohttp.ClientSession, told: Told, record: CallRecord) -> dict:
        same = ("max_tokens", "ignore_eos", "stop", "include_stop_str_in_output")
        body = {key: told.body[key] for key in same if key in told.body}
        body |= {"model": "gyre", "prompt": list(record.prompt), "temperature": 0, "logprobs": 2}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}
        body["skip_special_tokens"] = "tools" not in told.body  # the parser of calls wants to see them
        async with room, session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            (choice,) = (await response.json())["choices"]
        best = [sorted(step.values(), reverse=True) for step in choice["logprobs"]["top_logprobs"]]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "gaps": [step[0] - step[1] for step in best],
            "text": choice["text"],
            "finish": choice["finish_reason"],
        }

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(answer(session, told, record) for told, record in answers))


def compare(told: Told, record: CallRecord, whole: dict) -> tuple[bool, float]:
    """Whether an answer equals the uninterrupted one to its end, and how far its log-probabilities are off at most."""
    ours, theirs = list(record.sampled), whole["tokens"]
    shared = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if shared is None and len(ours) != len(theirs):
        raise AssertionError(f"{len(ours)} tokens, uninterrupted {len(theirs)}: {told.body} {record.spans}")
    if shared is not None:
        gap = whole["gaps"][shared]
        assert gap < TIE, f"token {shared} differs though the best two are {gap:g} apart: {record.spans} {told.body}"
    else:
        assert told.finish == ("tool_calls" if told.finish == "tool_calls" else whole["finish"])
        if "tools" not in told.body or "<" not in whole["text"]:  # what may be a call is not shown as text
            assert told.text == whole["text"], f"text differs: {told.text!r}, {whole['text']!r}"
    pairs = zip(record.logprobs[:shared], whole["logprobs"][:shared], strict=True)
    return shared is None, max((abs(a - b) for a, b in pairs), default=0.0)


def called(text: str) -> list[dict] | None:
    """The calls of tools in a text; None where one of them is not well formed."""
    found = []
    for piece in text.split("<tool_call>")[1:]:
        try:
            call = json.loads(piece.partition("</tool_call>")[0] if "</tool_call>" in piece else "")
        except ValueError:
            return None
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return None
        found.append(call)
    return found


def demand_calls(model: Path, answers: list[tuple[Told, CallRecord]]) -> int:
    """What clients were told of calls is what was sampled, however often it moved; returns the number of calls."""
    from transformers import AutoTokenizer

    tokenizer, number = AutoTokenizer.from_pretrained(model), 0
    for told, record in answers:
        if "tools" not in told.body or "stop" in told.body:  # a stop string may cut what is sampled anywhere
            continue
        text = tokenizer.decode(record.sampled)
        if (wanted := called(text)) is not None:
            calls = [(call["name"], json.loads(call["arguments"] or "null")) for call in told.calls]
            same = calls == [(call["name"], call["arguments"]) for call in wanted]
            assert same, f"{text!r} was told as {told.calls} {told.text!r} of {told.body}, by {record.spans}"
            number += len(calls)
    return number


def furthest_from_transformers(model: Path, answers: list[tuple[Told, CallRecord]]) -> float:
    """The largest difference between recorded log-probabilities and those that transformers gives."""
    import torch
    from transformers import AutoModelForCausalLM

    policy, worst = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), 0.0
    for told, record in answers:
        tokens = torch.tensor([*record.prompt, *record.sampled])
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, len(record.prompt) - 1 : -1] / told.body["temperature"]
        expected = torch.log_softmax(logits, -1).gather(1, tokens[len(record.prompt) :, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(record.logprobs)).abs().max()))
    return worst


# -- the whole --------------------------------------------------------------------------------------------------------
def family(others: Collection[int] = ()) -> dict[int, str]:
    """This process's descendants but `others` and what those start; forked engines are the fork server's children."""
    found, known = {}, {*others}
    for process in psutil.Process().children(recursive=True):  # parents before their children
        try:
            pid, parent, words = process.pid, process.ppid(), " ".join(process.cmdline())[:200]
        except psutil.Error:
            continue
        if parent in known and process.pid not in known:
            known.add(pid)  # say, of a Slurm that other tests go on to use
        if pid not in known:
            found[pid] = words
    return found


async def scenario(world: World, seconds: float, crashes: int) -> tuple[Harvest, dict]:
    """The chaos, and its comparison with uninterrupted runs; figures of the latter."""
    try:
        await world.start()
        harvest = await chaos(world, seconds, crashes)
        greedy = chosen(pair for pair in harvest.answers if pair[0].greedy)
        compared = [
            compare(*pair, whole) for pair, whole in zip(greedy, await uninterrupted(world, greedy), strict=True)
        ]
    finally:
        await world.stop()
    drawn = (pair for pair in harvest.answers if pair[0].body["temperature"])
    sampled = chosen(pair for pair in drawn if "presence_penalty" not in pair[0].body)
    figures = {
        "calls": demand_calls(world.model, harvest.answers),
        "greedy": len(greedy),
        "equal": sum(equal for equal, _ in compared),
        "off": max(off for _, off in compared),
        "sampled": len(sampled),
        "sampled off": furthest_from_transformers(world.model, sampled),
    }
    return harvest, figures


def show(harvest: Harvest, figures: dict, world: World) -> None:
    counts, moved = harvest.counts, sum(len(record.spans) > 1 for _, record in harvest.answers)
    told = {name: counts[name] for name in ("rerouted", "continued", "restarted", "tokens")}
    kept = {name: counts[name] for name in ("spliced", "drifted", "drift_tokens", "forked")}
    print(f"\nchaos: {harvest.requests} requests of {world.executions} executions: {json.dumps(told)}")
    print(f"  {moved} answers by more than one engine or version, most by {most_spans(harvest)} in turn")
    print(f"  histories: {json.dumps(kept)}; {figures['calls']} calls of tools, whole")
    print(f"  acts: {json.dumps(dict(world.done))}; policy versions {json.dumps(dict(world.policies))}")
    print(f"  engines started in {world.starts} s, the last ones after a crash")
    print(
        f"  greedy: {figures['greedy']} compared, {figures['equal']} equal to the end, the others to a tie; "
        f"log-probabilities off by {figures['off']:.1e} at most, of {figures['sampled']} sampled answers by "
        f"{figures['sampled off']:.1e}"
    )


def most_spans(harvest: Harvest) -> int:
    return max(len(record.spans) for _, record in harvest.answers)


def demand_nothing_left(world: World, before: dict[int, str], descriptors: int) -> None:
    """No process, shared memory, socket or file of an engine or the proxy is there any more."""
    deadline = time.monotonic() + 10
    others = [pid for pid, words in before.items() if "gyre.cell.zygote" not in words]
    while (
        left := {pid: words for pid, words in family(others).items() if pid not in before}
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes are left: {left}"
    assert not [path for path in world.segments if path.exists()], "shared memory is left"
    assert not list((world.directory / "scratch").rglob("*")), "sockets or files of engines are left"
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors are left open"
    text = (world.directory / "proxy.log").read_text()
    assert "Traceback" not in text, text[-4000:]


def run(directory: Path, seconds: float, crashes: int, capsys: pytest.CaptureFixture, handoff: bool = False) -> None:
    """The whole test, for so many seconds of chaos."""
    world = World(directory, random.Random(7), handoff=handoff)
    before, descriptors = family(), len(os.listdir("/proc/self/fd"))
    harvest, figures = asyncio.run(asyncio.wait_for(scenario(world, seconds, crashes), 20 * seconds + 600))
    with capsys.disabled():
        show(harvest, figures, world)
    demand_nothing_left(world, before, descriptors)
    assert figures["off"] < CLOSE and figures["sampled off"] < CLOSE, figures
    assert world.done["crash"] == crashes
    counts = harvest.counts
    assert counts["continued"] > CONVERSATIONS / 2 and counts["restarted"], "too little happened to show anything"
    assert counts["spliced"] > counts["forked"] and figures["calls"], "no conversation went on as it should"
    assert max(len(record.prompt) + len(record.sampled) for _, record in harvest.answers) < MAX_CONTEXT


@pytest.mark.whole
def test_roles_change_at_random_and_no_client_notices(tmp_path, fork_server, capsys):
    run(tmp_path, 60, 1, capsys)


@pytest.mark.whole
@pytest.mark.full
def test_three_minutes_of_chaos(tmp_path, fork_server, capsys):
    run(tmp_path, 180, 4, capsys)


@pytest.mark.whole
@pytest.mark.full
def test_chaos_with_kv_handed_over(tmp_path, fork_server, capsys):
    run(tmp_path, 60, 1, capsys, handoff=True)
