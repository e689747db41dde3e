"""What is recorded comes back exactly, is compact, and survives a crash up to its last whole frame."""

import asyncio
import dataclasses
import errno
import io
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.proxy.history import History
from gyre.proxy.recorder import CallRecord, Recorder, Span, read_records
from tests.proxy.fake_engine import FakeEngine
from tests.proxy.stand import stand

ids = st.lists(st.integers(0, 3), max_size=12)


def record(prompt, sampled):
    return CallRecord(
        prompt=array("i", prompt),
        sampled=array("i", sampled),
        logprobs=array("f", [-0.5] * len(sampled)),
        spans=[Span(1, 2, 3, len(sampled))],
        sampling={"temperature": 0.5, "stop": ["é"]},
        trainable=True,
        finish_reason="stop",
        rendered=(3, "ab"),
    )


class Disk(io.FileIO):
    """A file on a disk with `room` bytes, which may not be able to cut it either."""

    def __init__(self, path, room, cuts=True):
        super().__init__(path, "wb")
        self.room, self.cuts = room, cuts

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = super().write(data[: self.room])
        self.room -= count
        return count

    def truncate(self, size=None):
        if not self.cuts:
            raise OSError(errno.EIO, "Input/output error")
        return super().truncate(size)


def append(recorder, history, one):
    """As an execution does."""
    node, shared = near = history.nearest(one.prompt)
    call = recorder.append(one, node.call if node else -1, shared)
    history.add(call, one.prompt + one.sampled, len(one.sampled), near)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(ids, ids), max_size=14), st.integers(1, 5), st.integers(1, 40))
def test_round_trip(tmp_path_factory, calls, nodes, held):
    path = tmp_path_factory.mktemp("records") / "r"
    recorder, history = Recorder(path), History(nodes, held)
    written = [record(*call) for call in calls]
    for one in written:
        append(recorder, history, one)
        assert len(history) <= nodes and history.ids <= held
    recorder.close()
    recorder.close()
    assert [dataclasses.asdict(r) for r in read_records(path)] == [dataclasses.asdict(r) for r in written]


def test_a_conversation_grows_by_its_new_tokens_only(tmp_path):
    recorder, known = Recorder(tmp_path / "r"), History()
    history: list[int] = []
    for _ in range(50):
        history += range(1000)
        append(recorder, known, record(history, [5] * 10))
        history += [5] * 10
    recorder.close()
    assert known.ids == len(history)
    assert (tmp_path / "r").stat().st_size < 50 * (1000 * 4 + 10 * 8 + 500)
    assert read_records(tmp_path / "r")[-1].prompt.tolist() == history[:-10]


def test_what_was_written_survives_a_crash(tmp_path):
    recorder = Recorder(tmp_path / "r")
    recorder.append(record([1, 2], [3]))
    recorder.append(record([1, 2, 3, 4], [5]))
    data = (tmp_path / "r").read_bytes()  # nobody has closed it
    assert len(read_records(tmp_path / "r")) == 2
    for cut in (1, 20, 60):
        (tmp_path / "r").write_bytes(data[:-cut])
        assert len(read_records(tmp_path / "r")) == 1
    assert read_records(tmp_path / "none") == []


def on_disk(path, room, cuts=True):
    recorder = Recorder(path)
    recorder._file.close()
    recorder._file = Disk(path, room, cuts)
    return recorder


@pytest.mark.parametrize("room", [0, 1, 11, 100, 900])
def test_a_call_that_cannot_be_written_leaves_nothing_behind(tmp_path, room):
    recorder = on_disk(tmp_path / "r", 1 << 20)
    recorder.append(record([1, 2], [3]))
    recorder._file.room = room
    with pytest.raises(OSError, match="No space"):
        recorder.append(record(range(500), [3]))
    recorder._file.room = 1 << 20
    assert recorder.append(record([1, 2, 3, 4], [5])) == 1
    recorder.close()
    assert [one.sampled.tolist() for one in read_records(tmp_path / "r", 2)] == [[3], [5]]


def test_records_that_end_in_half_a_call_break_the_try(tmp_path):
    recorder = on_disk(tmp_path / "r", 300, cuts=False)
    with pytest.raises(OSError, match="No space"):
        recorder.append(record(range(500), [3]))
    recorder._file.room = 1 << 20
    with pytest.raises(OSError, match="half written"):
        recorder.append(record([1], [3]))
    with pytest.raises(OSError, match="half written"):
        recorder.close()
    recorder.close()


def test_as_many_calls_are_read_as_were_recorded(tmp_path):
    recorder = Recorder(tmp_path / "r")
    recorder.append(record([1, 2], [3]))
    recorder.append(record([1, 2, 3, 4], [5]))
    recorder.close()
    data = (tmp_path / "r").read_bytes()
    assert len(read_records(tmp_path / "r", 2)) == 2 and read_records(tmp_path / "none", 0) == []
    for cut in (data[:-1], data[:-200], b""):
        (tmp_path / "r").write_bytes(cut)
        with pytest.raises(ValueError, match="where 2 were recorded"):
            read_records(tmp_path / "r", 2)


def test_an_answer_that_cannot_be_recorded_is_none(tmp_path):
    ask = {"messages": [{"role": "user", "content": "hello"}]}

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            entry = it.proxy._executions[1]
            entry._recorder = on_disk(tmp_path / "1.records", 100)
            status, reply = await it.ask(ask)
            assert status == 502 and "No space left on device" in reply["error"]["message"]
            entry._recorder._file.room = 1 << 20
            assert (await it.ask(ask))[0] == 200
            counts = await it.proxy.close(1, 1)
        assert (counts["lost"], counts["answered"], counts["calls"]) == (1, 1, 1)
        assert "could not be written" in counts["fault"] and len(read_records(tmp_path / "1.records", 1)) == 1
        async with stand(tmp_path, FakeEngine(0)) as it:
            it.proxy._executions[1]._recorder = on_disk(tmp_path / "1.records", 100, cuts=False)
            assert (await it.ask(ask))[0] == 502
            with pytest.raises(OSError, match="half written"):
                await it.proxy.close(1, 1)
            await it.register()  # another try

    asyncio.run(asyncio.wait_for(scenario(), 30))
