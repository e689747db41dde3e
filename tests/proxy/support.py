"""What tests of the proxy's HTTP side share."""

import asyncio
import contextlib
import logging

from tests.proxy.fake_engine import SECRET

ASK = {"messages": [{"role": "user", "content": "hello"}]}
AUTH = {"Authorization": "Bearer token-1"}


def run(coroutine):
    """Run a scenario, which may take half a minute."""
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@contextlib.contextmanager
def silence(caplog):
    """Nothing here is a fault of the proxy's, and no secret is ever logged."""
    caplog.set_level(logging.DEBUG)
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert "token-1" not in caplog.text and SECRET not in caplog.text
