"""What a client is shown of an answer that another engine goes on with: just what goes beyond what it was shown."""

import pytest

from gyre.proxy.answer import Choice
from gyre.proxy.recorder import Span


def calls(arguments):
    return [{"index": 0, "id": "a", "function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize(
    ("shown", "again", "more"),
    [
        ({"content": "one "}, {"content": "one two"}, {"content": "two"}),  # the first engine had held some back
        ({"reasoning": "so"}, {"reasoning": "so it", "content": "is"}, {"reasoning": " it", "content": "is"}),
        ({"tool_calls": calls('{"x')}, {"tool_calls": calls('{"x": 1}')}, {"tool_calls": '": 1}'}),
    ],
)
def test_what_a_replay_has_beyond_what_was_shown_is_shown_once(shown, again, more):
    choice, span = Choice(), Span(0, 1, 0)
    choice.sample(span, [1, 2, 3], [-1.0] * 3)
    choice.merge(shown)
    choice.begin_leg(shown=True)
    assert choice.sample(Span(1, 1, 0), [1, 2, 3, 4], [0.0] * 3 + [-2.0]) == 3
    given = choice.merge(again)
    if "tool_calls" in more:
        assert [call["function"]["arguments"] for call in given["tool_calls"]] == [more["tool_calls"]]
        assert choice.message["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    else:
        assert given == more and choice.message == again
    assert choice.sampled.tolist() == [1, 2, 3, 4] and choice.logprobs.tolist() == [-1.0, -1.0, -1.0, -2.0]
    assert choice.merge({"content": "!"}) == {"content": "!"}, "the replay is over"
