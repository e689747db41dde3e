"""What is recorded comes back exactly, is compact, and survives a crash up to its last whole frame."""

import dataclasses
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.proxy.history import History
from gyre.proxy.recorder import CallRecord, Recorder, Span, read_records

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
