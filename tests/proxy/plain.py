"""A plain request and its one answer by a fake engine."""

import asyncio

import pytest

from tests.proxy.fake_engine import answer, logprob, render

ASK = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
PROMPT = render(ASK["messages"])
TOKENS = answer(PROMPT, 20)
TEXT = bytes(TOKENS[:-1]).decode()


def run(coroutine):
    """Run a scenario, which may take half a minute."""
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def check_record(record, tokens=TOKENS):
    """It has what was sampled, and how likely that was."""
    assert record.prompt.tolist() == PROMPT
    assert record.sampled.tolist() == tokens
    assert record.logprobs.tolist() == pytest.approx([logprob(i, t) for i, t in enumerate(tokens)])
    assert sum(span.tokens for span in record.spans) == len(tokens)
