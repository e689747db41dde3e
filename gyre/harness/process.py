"""Processes of a user's program: start, limits, output, and an end that leaves nothing behind.

A program gets a session of its own, so one signal reaches its whole process group. Descendants that left the group are
found too: the host adopts orphans (it is a child subreaper), and every program carries a mark in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path

from gyre.config import LimitsConfig

log = logging.getLogger(__name__)

MARK = "GYRE_MARK"  # in a program's environment: <job key>/<attempt>/<rank>/<execution>/<try>/<random>
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 1 << 16
#: Of the host's own environment a program must not see: it would take itself for a rank, or a part of a Slurm step.
_PRIVATE_PREFIXES = ("GYRE_", "SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMI2_", "PMIX_", "SUBMITIT_")
_PRIVATE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def environment(base: Mapping[str, str], extra: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program: the host's without what is private, the user's extra, then our `own`.

    Python's directory comes first on the path, so that `python` is the one Gyre runs with, and loopback never goes
    through a web proxy.
    """
    kept = {k: v for k, v in base.items() if not k.startswith(_PRIVATE_PREFIXES) and k not in _PRIVATE}
    env = {**kept, **extra, **own}
    env["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), env.get("PATH", os.defpath)]))
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, ["127.0.0.1,localhost", env.get(name, "")]))
    return env


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _tree(pid: int) -> Iterable[int]:
    """A process and all its descendants."""
    queue = [pid]
    while queue:
        current = queue.pop()
        yield current
        queue += _children(current)


def _carries(pid: int, mark: str) -> bool:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(f"{MARK}={mark}".encode()) for entry in data.split(b"\0"))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


#: Programs that asyncio waits for; whoever else collected them would steal their exit codes.
_running: set[int] = set()


async def kill_strays(mark: str, seconds: float = 5.0) -> int:
    """Kill adopted processes whose mark begins with this one, and all below them; returns how many there were."""
    loop = asyncio.get_running_loop()
    deadline, killed = loop.time() + seconds, set()
    while loop.time() < deadline:
        strays = [pid for pid in _children(os.getpid()) if pid not in _running and _carries(pid, mark)]
        for stray in strays:
            for pid in _tree(stray):
                _kill(pid)
                killed.add(pid)
        for pid in killed:  # they are ours to bury; their environment is gone, so they no longer match
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not strays:
            break
        await asyncio.sleep(0.005)
    return len(killed)


def bury(seen: set[int]) -> set[int]:
    """Collect adopted processes that ended by themselves: zombies that were `seen` by the call before, too.

    A zombie of asyncio's is gone by then, since asyncio collects its own at once.
    """
    zombies = {pid for pid in _children(os.getpid()) if pid not in _running and _ended(pid)}
    for pid in zombies & seen:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return zombies


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


class _Output:
    """Copies a pipe into a file up to a limit, and drops the rest."""

    def __init__(self, descriptor: int, file: FileIO, limit: int) -> None:
        self._descriptor = descriptor
        self._file = file
        self._left = limit
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            return False
        if self._left > 0:
            self._file.write(data[: self._left])
            if len(data) > self._left:
                self._file.write(b"\n[output beyond the limit was dropped]\n")
        self._left -= len(data)
        return True

    def close(self) -> None:
        """Take what has been written by now; whoever still holds the pipe writes into nothing."""
        for _ in range(64):
            if not self._read():
                break
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._file.close()


class Program:
    """A running program of the user's, in its own session."""

    def __init__(self, process: asyncio.subprocess.Process, outputs: list[_Output], mark: str) -> None:
        self._process = process
        self._outputs: list[_Output] | None = outputs
        self._mark = mark

    @classmethod
    async def start(
        cls,
        command: list[str],
        cwd: Path,
        env: Mapping[str, str],
        output: Path,
        mark: str,
        limits: LimitsConfig,
        errors: Path | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> Program:
        """Start it with its output, and its errors where they are to be apart, appended to files.

        Raises:
            OSError: the system cannot, or there is no such command.
        """
        files = [output] if errors is None else [output, errors]
        places = [open(file, "ab", buffering=0) for file in files]
        pipes = [os.pipe() for _ in files]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                env={**env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[-1][1],
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except BaseException:
            for (ours, _), place in zip(pipes, places, strict=True):
                os.close(ours)
                place.close()
            raise
        finally:
            for _, theirs in pipes:
                os.close(theirs)
        _running.add(process.pid)
        _limit(process.pid, limits)
        limit = limits.output_mb << 20
        outputs = [_Output(ours, place, limit) for (ours, _), place in zip(pipes, places, strict=True)]
        return cls(process, outputs, mark)

    @property
    def pid(self) -> int:
        """Process id, also its group's and session's."""
        return self._process.pid

    async def wait(self) -> int:
        """Exit code of the program itself; negative where a signal ended it."""
        return await self._process.wait()

    async def end(self) -> None:
        """Kill its group and whatever left the group, and close its output; doing it twice is harmless."""
        if self._outputs is None:
            return
        outputs, self._outputs = self._outputs, None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        _running.discard(self.pid)
        if strays := await kill_strays(self._mark):
            log.info("%d processes had left the group of %d", strays, self.pid)
        for output in outputs:
            output.close()


def _limit(pid: int, limits: LimitsConfig) -> None:
    """Set limits from outside, which spares the program a wrapper; it has not yet had time to use anything up."""
    wanted = {resource.RLIMIT_CORE: 0}
    if limits.memory_mb is not None:
        wanted[resource.RLIMIT_AS] = limits.memory_mb << 20
    if limits.files is not None:
        wanted[resource.RLIMIT_NOFILE] = limits.files
    for kind, value in wanted.items():
        with contextlib.suppress(ProcessLookupError):
            hard = resource.prlimit(pid, kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(pid, kind, (value, value))
