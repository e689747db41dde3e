"""A timed engine: as many tokens as were asked for, at a configured rate, and nothing computed.

`python -m gyre.cell.timed_engine` takes the place of `gyre.cell.engine` where `engine.kind` is timed. A token depends
on its place in its sequence alone, so an answer that goes on elsewhere goes on as if it had never moved. No token ends
an answer, and stop strings are not looked for.
"""

from __future__ import annotations

from typing import Any

from gyre.cell import stand_in
from gyre.cell.stand_in_answer import Answer
from gyre.cell.stand_in_request import Asked

_FIRST, _LETTERS = ord("a"), 26


class TimedAnswer(Answer):
    """The alphabet, over and over."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked, asked.length)
        self._place = len(asked.prompt)

    def tokens(self, begin: int, end: int) -> list[int]:
        """The ids of the tokens from `begin` to `end`."""
        return [_FIRST + place % _LETTERS for place in range(self._place + begin, self._place + end)]

    def text(self, begin: int, end: int) -> str:
        """Their letters."""
        return bytes(self.tokens(begin, end)).decode()

    def delta(self, begin: int, end: int) -> dict[str, Any]:
        """Their letters, as content."""
        return {"content": self.text(begin, end)}


if __name__ == "__main__":
    stand_in.main(lambda settings: TimedAnswer)
