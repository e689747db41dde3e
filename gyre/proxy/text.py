"""Text of an answer, made from its tokens here, for an answer that more than one engine wrote.

The first engine's own text is passed on as it comes. An engine that continues an answer cannot know what text the
earlier one still held back (a character whose bytes were not all there, the start of a stop string), so from the
first continuation on the proxy detokenizes itself, in the way engines do: incrementally, primed with the prompt, and
with stop strings checked after every token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@functools.cache
def load_tokenizer(path: Path) -> Any | None:
    """The fast tokenizer in a file or model directory; None where there is none that can be used."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return None
    import tokenizers  # late: most runs of the proxy never need it before the first move

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare exceptions; without a tokenizer answers restart instead
        return None


class TextStream:
    """Turns tokens into text as they come, and ends it at a stop string."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = self._decoder(list(prompt))
        self._stop = list(stop)
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._held = 0 if keep_stop or not stop else max(map(len, stop)) - 1
        self._tokens = 0
        self._delivered = 0
        self.text = ""

    def _decoder(self, prompt: list[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=prompt, skip_special_tokens=self._skip_special)

    def push(self, token: int, silent: bool = False) -> str | None:
        """Add a sampled token; a `silent` one ends the answer and has no text. Returns the stop string it completed."""
        self._tokens += 1
        if silent:
            return None
        before = len(self.text)
        self.text += self._step(token)
        if self._tokens <= self._min_tokens:
            return None
        return self._check_stop(before)

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # invalid UTF-8 upset the library's state: begin anew from here, as engines do
            self._stream = self._decoder([])
            return self._stream.step(self._tokenizer, token) or ""

    def _check_stop(self, before: int) -> str | None:
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (found is None or at + len(stop) < found[0]):
                found = (at + len(stop), at, stop)
        if found is None:
            return None
        end, at, stop = found
        self.text = self.text[: end if self._keep_stop else at]
        return stop

    def delta(self, finished: bool = False) -> str:
        """Text that may be shown since the last call; the possible start of a stop string waits until the end."""
        end = len(self.text) if finished else max(self._delivered, len(self.text) - self._held)
        delta, self._delivered = self.text[self._delivered : end], max(self._delivered, end)
        return delta

    def skip(self, delivered: str) -> bool:
        """Count text as shown already; False if this stream's text does not begin with it."""
        self._delivered = len(delivered)
        return self.text.startswith(delivered)
