"""The benchmark of the proxy, in seconds: what its clients are answered is what the proxy records."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

PLACE = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.full
def test_every_token_that_the_clients_are_answered_with_is_recorded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(PLACE)
    import proxy

    async def run() -> None:
        engines = proxy.Engines(prompt=50)
        await engines.start()
        try:
            through, seen = await proxy.gyre(engines, tmp_path), []
            for level in (proxy.Level(3, 50, 5), proxy.Level(3, 0, 5, clients=2), proxy.Level(3, 0, 5, stream=False)):
                seen.append(await proxy.measure(engines, through, level, seconds=0.3))
                seen.append(await proxy.measure(engines, proxy.direct(engines), level, seconds=0.3))
            recorded = await through.stop()
        finally:
            await engines.stop()
        assert recorded["tokens"] == sum(figures["tokens"] for figures in seen[::2]) > 0
        assert recorded["requests"] == recorded["answered"] and recorded["lost"] == 0
        assert all(figures["requests_per_s"] > 0 for figures in seen)

    asyncio.run(run())
