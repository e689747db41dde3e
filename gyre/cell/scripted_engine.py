"""A scripted engine: it replays the answers of a file (`gyre.cell.stand_in_script`), token by token.

`python -m gyre.cell.scripted_engine` takes the place of `gyre.cell.engine` where `engine.kind` is scripted: a harness
can be tried with all of Gyre around it, and neither a model nor a GPU. An answer depends on its request and not on the
engine, so it goes on elsewhere as if it had never moved.
"""

from __future__ import annotations

import bisect
from typing import Any

from gyre.cell import stand_in
from gyre.cell.stand_in_answer import Answer
from gyre.cell.stand_in_request import Asked
from gyre.cell.stand_in_script import Line, lay_out, read
from gyre.cell.stand_in_text import END

Message = dict[str, Any]


class ScriptedAnswer(Answer):
    """A line of the script, as far as the request lets it be said."""

    piece_tokens = 8

    def __init__(self, asked: Asked, line: Line) -> None:
        """Lay the answer out.

        Raises:
            ValueError: what was kept of it is not its beginning.
        """
        ids, self._parts = lay_out(line)
        self._line = line
        self._shown = len(ids)  # tokens that have text
        self.finish_reason = line.finish_reason
        self._stop(asked, ids)
        if self.stop_reason is None and line.finish_reason != "length":
            ids.append(END)
        if len(ids) > asked.length:
            del ids[asked.length :]
            self._shown = min(self._shown, asked.length)
            self.finish_reason, self.stop_reason = "length", None
        if list(asked.kept) != ids[: len(asked.kept)]:
            raise ValueError(f"the tokens that are kept are not the beginning of line {line.number} of the script")
        super().__init__(asked, len(ids))
        self._ids = ids
        self._begins = [part.begin for part in self._parts]

    def _stop(self, asked: Asked, ids: list[int]) -> None:
        """End the answer at the first stop string in what is sampled."""
        said = bytes(ids)
        found = [(at + len(stop.encode()), at, stop) for stop in asked.stop if (at := said.find(stop.encode())) >= 0]
        if found:
            end, at, self.stop_reason = min(found)
            del ids[end:]
            self._shown = end if asked.keep_stop else at
            self.finish_reason = "stop"

    def tokens(self, begin: int, end: int) -> list[int]:
        """The ids of the tokens from `begin` to `end`."""
        return self._ids[begin:end]

    def text(self, begin: int, end: int) -> str:
        """Their text; a character belongs to the token that completes it."""
        return bytes(self._ids[self._whole(begin) : self._whole(end)]).decode("utf-8", "replace")

    def _whole(self, at: int) -> int:
        """The end of the last character that is complete in the first `at` tokens."""
        if at >= self._shown:
            return self._shown
        while at and self._ids[at] & 0xC0 == 0x80:
            at -= 1
        return at

    def delta(self, begin: int, end: int) -> Message:
        """What they add to the message; what is not sampled whole is not shown before its end."""
        delta: Message = {}
        for part in self._parts[max(0, bisect.bisect_left(self._begins, begin) - 1) :]:
            if part.begin >= min(end, self._shown):
                break
            if part.end <= begin and part.begin < begin:
                continue
            # Every part but a stopped one ends with a whole character, so its pieces do not reach into others.
            text = self.text(max(begin, part.begin), min(end, part.end))
            if part.what.startswith("call "):
                self._add_call(delta, int(part.what[5:]), begin <= part.begin, text)
            elif part.what and text:
                delta[part.what] = delta.get(part.what, "") + text
        return delta

    def _add_call(self, delta: Message, index: int, begins: bool, arguments: str) -> None:
        """A call's name with the first of its arguments, and the arguments as they come."""
        entry: Message = {"index": index, "function": {"arguments": arguments}}
        if begins:
            call = self._line.calls[index]
            key = call.id or f"call-{self.asked.execution}-{self.asked.turns}-{index}"  # the same on any engine
            entry = {
                "index": index,
                "id": key,
                "type": "function",
                "function": {"name": call.name, **entry["function"]},
            }
        delta.setdefault("tool_calls", []).append(entry)


def _kind(settings: Any) -> stand_in.Make:
    script = read(settings.scripted)
    return lambda asked: ScriptedAnswer(asked, script.line(asked))


if __name__ == "__main__":
    stand_in.main(_kind)
