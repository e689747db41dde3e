"""A process that has imported what trainers import, for tests: each process of a small world is a fork of it.

Importing torch, transformers and DeepSpeed takes six seconds of a CPU, and a test of cells starts a dozen processes. In
a fork followers are forks too, of their lead; everything else is as it is where processes are started by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from gyre.child import Child, die_with_parent

_PACKET = 1 << 18
_CHILD, _FOLLOWER = "GYRE_CHILD_FD", "GYRE_CREW_FD"
_IMPORTS = (
    "gyre.training.trainer",
    "gyre.training.feeder",
    "gyre.training.snapshots",
    "transformers.models.qwen3.modeling_qwen3",
    "hypothesis",
)


class Nest:
    """The client's end."""

    def __init__(self, log: Path) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
                pass_fds=(theirs.fileno(),),
            )

    def close(self) -> None:
        """End it, and all its forks with it."""
        self._ours.close()
        self._process.kill()
        self._process.wait()

    async def spawn(self, name: str, words: list[str], log: Path, on_event=lambda event: None, env=None) -> Child:
        """As `Child.spawn`, of `-m MODULE` or a script."""
        ours, theirs = socket.socketpair()
        with theirs, open(log, "ab") as output:
            message = {"words": words, "environment": {**os.environ, **(env or {})}}
            socket.send_fds(self._ours, [json.dumps(message).encode()], [theirs.fileno(), output.fileno()])
            pid = int(self._ours.recv(_PACKET))  # at once: it forks, and does nothing else
        return await Child.adopt(name, Forked(pid), ours, log, on_event)


class Forked:
    """A process that is another one's child, as asyncio's subprocesses are."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ending = asyncio.ensure_future(self._end())

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    async def _end(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        self.returncode = -1  # nobody asks how
        return self.returncode


# -- the process ---------------------------------------------------------------------------------------------------
class Fork:
    """A follower that its lead has forked, as `subprocess.Popen` is one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; the timeout is not kept, as a test that hangs is ended from outside."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_follower(number: int, descriptor: int) -> Fork:
    """In place of `gyre.training.crew.spawn`."""
    pid = os.fork()
    if pid == 0:
        become(["-m", "gyre.training.follower"], {**os.environ}, _FOLLOWER, descriptor)
    return Fork(pid)


def become(words: list[str], environment: dict[str, str], variable: str, descriptor: int) -> None:
    """Run a program in this fork; does not return."""
    code = 1
    try:
        own = os.dup(descriptor)  # the others must not live on here: who waits for their end would wait for ours
        os.dup2(own, 3)
        os.closerange(4, 1 << 16)
        os.environ.clear()
        os.environ.update({**environment, variable: "3"})
        sys.argv = words
        if words[0] == "-m":
            __import__(words[1], fromlist=["main"]).main()
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(client: socket.socket) -> None:
    """Fork until the client closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks here
    while True:
        data, descriptors, _, _ = socket.recv_fds(client, _PACKET, 2)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            message = json.loads(data)
            os.dup2(descriptors[1], 1)
            os.dup2(descriptors[1], 2)
            become(message["words"][1:], message["environment"], _CHILD, descriptors[0])
        for descriptor in descriptors:
            os.close(descriptor)
        client.send(str(pid).encode())


def main() -> None:
    """Entry point."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1)  # where a fork hangs, for whoever looks into it
    for name in _IMPORTS:
        __import__(name)
    import torch

    from gyre.training import core, crew

    core.import_deepspeed(torch.device("cpu"))
    crew.spawn = fork_follower
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
