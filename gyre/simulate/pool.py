"""Simulations over processes: every one of them is given the same context and a job of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import Progress

Work = Callable[[Any, Any], Any]  # context, job -> result; a function of a module, so that processes can name it

_given: tuple[Work, Any]


def results(work: Work, context: Any, jobs: Sequence[Any], workers: int) -> Iterator[Any]:
    """What `work(context, job)` returns for every job, in their order; in this process where one is enough."""
    if workers == 1 or len(jobs) <= 1:
        yield from (work(context, job) for job in jobs)
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), initializer=_adopt, initargs=(work, context)) as pool:
        yield from pool.map(_adopted, jobs, chunksize=max(1, min(8, len(jobs) // (4 * workers))))


def watched(work: Work, context: Any, jobs: Sequence[Any], workers: int, show: bool) -> Iterator[Any]:
    """The same, with a bar on stderr while it goes on if `show`."""
    with Progress(console=Console(stderr=True), transient=True, disable=not show) as progress:
        bar = progress.add_task("simulating", total=len(jobs))
        for result in results(work, context, jobs, workers):
            yield result
            progress.advance(bar)


def _adopt(work: Work, context: Any) -> None:
    global _given
    _given = (work, context)


def _adopted(job: Any) -> Any:
    work, context = _given
    return work(context, job)
