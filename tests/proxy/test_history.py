"""Conversations are recognised however a client formats them, and what really changed is not."""

import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.proxy.history import History, canonical, shared_length

ids = st.lists(st.integers(0, 3), max_size=12)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([0.5, 1e300]),
    st.text(st.characters(codec="utf-8"), max_size=4),
)
values = st.recursive(
    leaves,
    lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text("aé\n", max_size=2), v, max_size=3)),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("abc", min_size=1, max_size=2), values, max_size=3)


def call(name, text, identity="c0"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


def answer(content=None, calls=(), reasoning=None):
    message = {"content": content, "tool_calls": list(calls)} if calls else {"content": content}
    return message | ({"reasoning": reasoning} if reasoning else {})


def user(text):
    return {"role": "user", "content": text}


def assistant(message):
    return {"role": "assistant", **message}


def remember(history, messages, message, prompt=(1, 2), sampled=(3,), rendering=None):
    """As a request that is answered; returns its node."""
    found = history.find(rendering or {}, messages)
    prompt = array("i", prompt)
    near = history.nearest(prompt, found.node)
    return history.add(0, prompt + array("i", sampled), len(sampled), near, None, found.asked, message, (2, "d"))


@st.composite
def reformatted(draw, value):
    """A JSON value as another program may write it: key order, spaces, escapes, whole numbers as floats."""

    def shuffled(one):
        if isinstance(one, dict):
            return {key: shuffled(one[key]) for key in draw(st.permutations(sorted(one)))}
        if isinstance(one, list):
            return [shuffled(item) for item in one]
        whole = isinstance(one, int) and not isinstance(one, bool) and draw(st.booleans())
        return float(one) if whole else one

    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")]))
    indent = draw(st.sampled_from([None, None, 2]))
    return json.dumps(shuffled(value), separators=separators, indent=indent, ensure_ascii=draw(st.booleans()))


@settings(max_examples=80, deadline=None)
@given(st.data(), arguments, st.sampled_from(["", "so be it", " so\n"]), st.sampled_from([None, "because"]))
def test_a_reformatted_answer_is_the_one_that_was_given(data, given_arguments, content, reasoning):
    history, messages = History(), [user("do it")]
    original = answer(content or None, [call("f", json.dumps(given_arguments)), call("g", "", "c1")], reasoning)
    node = remember(history, messages, original)
    text = data.draw(reformatted(given_arguments))
    spaces = data.draw(st.sampled_from(["", " ", "\n"]))
    again = assistant(answer(spaces + content + spaces, [call("f", text, "x0"), call("g", "{}", "x1")]))
    if data.draw(st.booleans()):
        again["content"] = [{"type": "text", "text": again["content"], "cache_control": None}]
    if reasoning and data.draw(st.booleans()):
        again["reasoning_content"] = reasoning + spaces
    results = [{"role": "tool", "tool_call_id": f"x{i}", "content": "done"} for i in range(2)]
    found = history.find({}, [*messages, again, *results])
    assert found.node is node and not found.changed
    assert found.messages[1] == {"role": "assistant", **original}
    assert [m["tool_call_id"] for m in found.messages[2:]] == ["c0", "c1"]
    assert again["tool_calls"][0]["id"] == "x0", "the client's own messages are left alone"


@pytest.mark.parametrize(
    "changed",
    [
        answer("no"),
        answer("yes", [call("f", '{"a": 1}')]),
        answer("yes", [call("f", '{"a": 2, "b": [1]}')]),
        answer("yes", [call("g", '{"a": 1, "b": [1]}')]),
        answer("yes", [call("f", '{"a": 1, "b": [1]}'), call("f", "{}")]),
        answer("yes", [call("f", '{"a": 1, "b": [1]}')], "another reason"),
        answer("yes", [call("f", '{"a": "1", "b": [1]}')]),
        answer("yes", [call("f", '{"a": true, "b": [1]}')]),
    ],
)
def test_what_a_client_changed_is_not_known(changed):
    history, messages = History(), [user("do it")]
    remember(history, messages, answer("yes", [call("f", '{"a": 1, "b": [1]}')], "a reason"))
    found = history.find({}, [*messages, assistant(changed), user("go on")])
    assert found.node is None and found.messages is None and found.changed
    other = history.find({}, [user("do that"), assistant(answer("yes")), user("go on")])
    assert other.node is None and not other.changed, "another conversation has forked nothing"
    assert history.find({"tools": [1]}, [*messages, assistant(answer("yes"))]).node is None


def test_the_deepest_known_answer_is_the_history_even_below_a_changed_one():
    history, messages = History(), [user("one")]
    first = remember(history, messages, answer("1"))
    messages += [assistant(answer("1")), user("two")]
    second = remember(history, messages, answer("2", reasoning="why"), (1, 2, 3, 4), (5, 6))
    assert second.base is first and second.shared == 3
    assert second.sequence().tolist() == [1, 2, 3, 4, 5, 6]
    found = history.find({}, [*messages, assistant(answer("2")), user("three")])
    assert found.node is second and [m.get("reasoning") for m in found.messages] == [None, None, None, "why", None]
    known = found.known(second.sequence())
    assert known.answer == 2 and known.rendered == (2, "d") and known.texts == ("why", "2")
    found = history.find({}, [*messages, assistant(answer("no, 2")), user("three")])
    assert found.node is first and found.changed


def test_several_answers_to_one_question_are_known_side_by_side():
    history, messages = History(), [user("one")]
    nodes = [remember(history, messages, answer(text), sampled=(i, i)) for i, text in enumerate("abc")]
    for node, text in zip(nodes, "abc", strict=True):
        assert history.find({}, [*messages, assistant(answer(text)), user("on")]).node is node
    assert history.ids == 4 + 2 + 2, "they share their prompt"
    whys = [remember(history, messages, answer("a", reasoning=why), sampled=(9, i)) for i, why in enumerate("xy")]
    for node, why in zip(whys, "xy", strict=True):
        assert history.find({}, [*messages, assistant(answer("a", reasoning=why))]).node is node
    assert history.find({}, [*messages, assistant(answer("a"))]).node is whys[1], "the newest where it does not say"


def test_images_and_names_are_told_apart():
    one = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "a"}}]}
    other = json.loads(json.dumps(one).replace('"a"', '"b"'))
    assert canonical(one) != canonical(other) and canonical(one) == canonical(json.loads(json.dumps(one, indent=1)))
    assert canonical(user("x")) != canonical({**user("x"), "name": "n"})
    assert canonical(user("x")) == canonical(user([{"type": "text", "text": " x"}]))


@pytest.mark.parametrize(
    "nonsense",
    [None, 5, [], {}, {"role": []}, {"content": 5}, {"content": [None, 5, {"text": 5}]}, {"tool_calls": 5},
     {"tool_calls": [5]}, {"tool_calls": [{"function": 5}]}, {"tool_calls": [{"function": {"arguments": 5}}]},
     {"role": "\ud800"},
     {"tool_calls": [{"function": {"arguments": "{"}}]}, {"tool_calls": [{"function": {"arguments": "[" * 10_000}}]},
     {"content": 1 << 70}],
)  # fmt: skip
def test_nonsense_is_only_unknown(nonsense):
    history = History()
    assert isinstance(canonical(nonsense), bytes)
    if isinstance(nonsense, dict):
        nonsense = {"role": "assistant", **nonsense, "reasoning": 5, "tool_call_id": {}}
    remember(history, [user("x")], answer("yes", [call("f", "{}")]))
    again = assistant(answer("yes", [{"id": {}, "function": {"name": "f", "arguments": {}}}]))
    found = history.find({}, [user("x"), again, nonsense])
    assert found.node is not None and found.messages[2] == nonsense


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(4, 60))
def test_memory_is_bounded_and_what_is_held_is_whole(data, nodes, held):
    history = History(nodes, held)
    conversations = [[user(str(i))] for i in range(3)]
    sequences: list[list[int]] = [[7, i] for i in range(3)]
    for turn in range(data.draw(st.integers(1, 12))):
        which = data.draw(st.integers(0, 2))
        messages, sampled = conversations[which], data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        prompt = sequences[which] + [turn]
        found = history.find({}, messages)
        if found.node is not None:
            known = found.node.sequence().tolist()
            assert sequences[which][: len(known)] == known, "the last answer that is held, of its own conversation"
        remember(history, messages, answer(str(turn)), prompt, sampled)
        sequences[which] = prompt + sampled
        messages += [assistant(answer(str(turn))), user("on")]
        assert len(history) <= nodes and history.ids <= held
        assert history.ids == sum(len(node.tail) for node in history._nodes.values())
        for node in history._nodes.values():
            assert node.base is None or node.base.serial in history._nodes, "a base outlives what builds on it"
        assert len(history._steps) <= nodes and sum(history._asked.values()) == len(history)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from([None, "hm"])), max_size=20),
    st.integers(1, 4),
)
def test_the_same_answers_again_are_forgotten_like_others(calls, nodes):
    history = History(nodes, 1000)
    for question, said, reasoning in calls:
        prompt = (7, question)
        found = history.find({}, [user(str(question))])
        near = history.nearest(array("i", prompt), found.node)
        ids = array("i", [*prompt, said])
        node = history.add(0, ids, 1, near, None, found.asked, answer(str(said), reasoning=reasoning), (2, "d"))
        again = history.find({}, [user(str(question)), assistant(answer(str(said), reasoning=reasoning)), user("on")])
        assert again.node is node or node.serial not in history._nodes, "the newest one, if it is held"
        assert len(history) <= nodes and sum(history._asked.values()) == len(history)
        held = {node.serial for alike in history._steps.values() for node in alike.values()}
        assert held <= history._nodes.keys()


@given(ids, ids)
def test_shared_length(a, b):
    length = shared_length(array("i", a), array("i", b))
    assert a[:length] == b[:length] and (length == min(len(a), len(b)) or a[length] != b[length])
