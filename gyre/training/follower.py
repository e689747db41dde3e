"""A worker of a cell that is not its lead: a process that does what the lead says, in the order in which it says it.

    python -m gyre.training.follower           (spawned by `gyre.training.crew`)

It ends with its lead. An operation that fails ends it too, after it has said so: the workers of a cell are of no use
without each other, since they meet in collectives, and the lead ends when one of them does. Only where it cannot start
for a fault in the input it waits for the lead to say so, and to end.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import traceback
from collections import deque
from typing import Any

from gyre.child import die_with_parent
from gyre.errors import EXIT_FAULT, ReduceFailed, UserError
from gyre.training.frames import Frames

FD_VARIABLE = "GYRE_CREW_FD"
_LAST_WORDS_SECONDS = 2.0  # for the lead to read them


class Follower:
    """Reads the lead's words and answers each of them."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._waiting: deque[tuple[dict[str, Any], bytes]] = deque()
        self._worker: Any = None

    def serve(self) -> None:
        """Answer until the lead closes; ends the process where an operation fails."""
        while (frame := self._next()) is not None:
            head, body = frame
            if head["do"] == "call_off":
                continue  # of a reduce that had ended already
            try:
                answer = {"result": self._perform(head, body) or {}}
            except ReduceFailed as error:
                answer = {"reduce_failed": str(error)}
            except UserError as error:  # of the start; it may be long before the lead, which builds too, reads this
                answer = {"user_error": str(error)}
            except BaseException as error:
                traceback.print_exception(error)
                self._frames.send({"error": f"{type(error).__name__}: {error}"})
                time.sleep(_LAST_WORDS_SECONDS)
                os._exit(EXIT_FAULT)  # nothing gentler is sure to end a process that has collectives running
            self._frames.send(answer)

    def _next(self) -> tuple[dict[str, Any], bytes] | None:
        return self._waiting.popleft() if self._waiting else self._frames.receive()

    def _perform(self, head: dict[str, Any], body: bytes) -> dict[str, Any] | None:
        name, arguments = head["do"], head["arguments"]
        if name == "start":
            return self._start(**arguments)
        if name == "feed":
            return self._feed(body)
        if name == "reduce":
            return self._worker.reduce(**arguments, called_off=self._called_off)
        return getattr(self._worker, name)(**arguments)

    def _feed(self, body: bytes) -> dict[str, Any]:
        from gyre.training.packing import decode

        return self._worker.feed(decode(body))

    def _start(self, number: int, port: int, **start: Any) -> None:
        import torch.distributed as dist

        from gyre.training.worker import Start, Worker

        meeting = dist.TCPStore("127.0.0.1", port, None, is_master=False)
        self._worker = Worker(Start(**start), number, meeting)

    def _called_off(self) -> bool:
        """Whether the lead has called the reduce off that runs now."""
        while self._frames.ready():
            frame = self._frames.receive()
            if frame is None:
                os._exit(EXIT_FAULT)
            if frame[0]["do"] == "call_off":
                return True
            self._waiting.append(frame)
        return False


def main() -> None:
    """Entry point."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the whole group; the lead decides when this one ends
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    Follower(Frames(socket.socket(fileno=int(os.environ.pop(FD_VARIABLE))))).serve()


if __name__ == "__main__":
    main()
