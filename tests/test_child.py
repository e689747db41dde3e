"""Children answer, emit, fail and die as their parent expects."""

import asyncio
import os
import signal
import sys

import pytest

from gyre.child import Child
from gyre.errors import ChildFailed, UserError

PROGRAM = """
import os
from gyre.child import Endpoint
from gyre.errors import UserError
endpoint = Endpoint()
def double(x):
    endpoint.emit({"saw": x})
    return {"y": 2 * x}
def fail():
    raise ValueError("no")
def complain():
    raise UserError("change x")
def hang():
    import time
    time.sleep(60)
endpoint.serve({"double": double, "fail": fail, "complain": complain, "hang": hang, "die": lambda: os._exit(3)})
"""

ASYNC_PROGRAM = """
import asyncio
from gyre.child import AsyncEndpoint
endpoint = AsyncEndpoint()
async def late(x):
    await asyncio.sleep(x)
    return {"x": x}
asyncio.run(endpoint.serve({"late": late}))
"""


async def start(tmp_path, program=PROGRAM, events=None):
    on_event = events.append if events is not None else lambda message: None
    return await Child.spawn("child", [sys.executable, "-c", program], tmp_path / "child.log", on_event)


def test_calls_events_and_errors(tmp_path):
    async def scenario():
        events = []
        child = await start(tmp_path, events=events)
        assert await child.call("double", x=4) == {"y": 8}
        assert events == [{"saw": 4}]
        with pytest.raises(ChildFailed, match="ValueError: no"):
            await child.call("fail")
        with pytest.raises(UserError, match="change x"):
            await child.call("complain")
        with pytest.raises(ChildFailed, match=r"took more than 0\.2 s"):
            await child.call("hang", timeout=0.2)
        await child.stop()
        assert not child.alive
        assert "ValueError: no" in (tmp_path / "child.log").read_text()

    asyncio.run(scenario())


def test_a_dead_child_fails_its_calls(tmp_path):
    async def scenario():
        child = await start(tmp_path)
        with pytest.raises(ChildFailed, match="ended"):
            await child.call("die")
        assert await child.wait() == 3
        with pytest.raises(ChildFailed):
            await child.call("double", x=1)
        await child.stop()

    asyncio.run(scenario())


def test_async_child_answers_out_of_order(tmp_path):
    async def scenario():
        child = await start(tmp_path, ASYNC_PROGRAM)
        order = []

        async def call(x):
            await child.call("late", x=x)
            order.append(x)

        await asyncio.gather(call(0.3), call(0.01))
        assert order == [0.01, 0.3]
        await child.stop()

    asyncio.run(scenario())


def test_child_dies_with_its_parent(tmp_path):
    async def scenario():
        outer = f"""
import asyncio, sys, pathlib, time
from gyre.child import Child
async def main():
    child = await Child.spawn("inner", [sys.executable, "-c", {PROGRAM!r}], pathlib.Path({str(tmp_path)!r}) / "i.log")
    await child.call("double", x=1)
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", outer, stdout=asyncio.subprocess.PIPE)
        pid = int(await parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
        for _ in range(100):
            if not os.path.exists(f"/proc/{pid}") or open(f"/proc/{pid}/stat").read().split(")")[1].split()[0] == "Z":
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the child outlived its parent")

    asyncio.run(scenario())
