"""What a trainer did, added up from its events, for people. Pure."""

from __future__ import annotations

from typing import Any


class Effort:
    """What a trainer did over all its updates, added up from its events."""

    #: Stages of an update in which the trainer works; while training, only the computing of micro-steps counts.
    WORKING = ("reducing", "stepping", "writing")

    def __init__(self) -> None:
        self.text = ""
        self.micro_steps = 0  # of the present update
        self._seconds = self._tokens = 0.0  # of stages and updates that are over
        self._computed = self._update_tokens = 0.0  # of the present update
        self._stage = ""
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """Time spent computing, reducing, stepping and writing weights."""
        return self._seconds + self._computed

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return int(self._tokens + self._update_tokens)

    def take(self, event: dict[str, Any], now: float) -> None:
        """Take in a `progress` or `stage` event; `now` is monotonic."""
        if event["type"] == "stage":
            self._leave_stage(now)
            self._stage = event["stage"]
            self.text = f"update {event['update']}: {self._stage}"
            return
        self.micro_steps = event["micro_steps"]
        self._update_tokens, self._computed = event["tokens"], event["seconds"]
        self.text = f"update {event['update']}: {self.micro_steps} micro-steps done"

    def end(self, now: float) -> None:
        """The part in the present update is over."""
        self._leave_stage(now)
        self._stage = ""
        self._seconds += self._computed
        self._tokens += self._update_tokens
        self._computed = self._update_tokens = 0.0
        self.micro_steps = 0

    def _leave_stage(self, now: float) -> None:
        if self._stage in self.WORKING:
            self._seconds += now - self._since
        self._since = now
