"""What a rank needs to know about its node: the address others reach it at, ports, GPUs, and node-local scratch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from gyre.config import Config
from gyre.errors import UserError
from gyre.launch.identity import Identity

LOOPBACK = "127.0.0.1"
#: Ports of one rank, where `network.port_base` is set; every purpose has its own, so that nothing has to be searched.
PORTS_PER_RANK = 16
_PORTS = {"store": 0, "engine": 1, "feeder": 2, "snapshots": 3, "proxy": 4, "rendezvous": 5}
_SIOCGIFADDR = 0x8915


def port(config: Config, purpose: str, rank: int = 0) -> int:
    """The port for one purpose ("store", "engine", "feeder", "snapshots", "proxy", "rendezvous") of a rank.

    0, by which the system chooses a free one, unless `network.port_base` is set.
    """
    base = config.network.port_base
    return base + rank * PORTS_PER_RANK + _PORTS[purpose] if base else 0


# -- addresses -------------------------------------------------------------------------------------------------------
def interface_address(name: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Raises:
        UserError: it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError as error:
            there = ", ".join(each for _, each in socket.if_nameindex())
            raise UserError(
                f"network.interface: {name!r} has no IPv4 address on {socket.gethostname()}; it has {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _route_to(address: str) -> str | None:
    """The address of this node from which packets to another one leave; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def _resolve(name: str) -> str | None:
    with contextlib.suppress(OSError):
        return socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]
    return None


def address(config: Config, identity: Identity) -> str:
    """The IPv4 address at which the run's other ranks reach this node.

    `network.interface` decides where it is set. Otherwise it is the address that routes to the other nodes start from,
    and loopback when there are none.

    Raises:
        UserError: the interface does not exist here.
    """
    if config.network.interface:
        return interface_address(config.network.interface)
    others = [name for name in identity.nodes if name != identity.node]
    if identity.launcher == "local" or not others:
        return LOOPBACK
    # Some sites resolve a node's own name to loopback, so the launch node's address is no use on the launch node.
    candidates = [identity.launch_address, *(_resolve(name) for name in others[:8])]
    for candidate in candidates:
        mine = _route_to(candidate) if candidate else None
        if mine and not mine.startswith("127."):
            return mine
    # Nobody is anywhere but here: several Slurm nodes on one machine.
    return LOOPBACK


# -- GPUs ------------------------------------------------------------------------------------------------------------
def gpus_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """NVIDIA GPUs that a process may use on this machine; None where that cannot be told without a driver's help."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])
    if any(Path(path).exists() for path in ("/dev/kfd", "/dev/dxg")):
        return None
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))


def devices(config: Config, identity: Identity, engine: bool, environ: Mapping[str, str] = os.environ) -> str | None:
    """What CUDA_VISIBLE_DEVICES must be for a rank's children, or None to leave it as it is.

    A node's engines take their cell's GPUs in the order of their local ranks; harness hosts take none.
    """
    if not engine or not config.cells.gpus:
        return ""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and identity.launcher == "slurm" and identity.local_rank == 0:
        here = gpus_here(environ)
        if here is not None and here <= config.cells.gpus:
            return None
    names = visible.split(",") if visible else [str(i) for i in range(gpus_here(environ) or 0)]
    if len(names) <= config.cells.gpus:  # Slurm already narrowed it to this task
        return visible
    first = identity.local_rank * config.cells.gpus
    return ",".join(names[first : first + config.cells.gpus])


# -- scratch ---------------------------------------------------------------------------------------------------------
def scratch(config: Config, run_name: str, attempt: int, rank: int) -> Path:
    """Make and return this rank's node-local directory; who asked for it removes it.

    It is under `network.scratch`, else $SLURM_TMPDIR, $TMPDIR or /tmp, with a short name (Unix sockets live in it) that
    no other run, attempt or user shares.
    """
    base, run = _scratch_base(config), _scratch_name(config, run_name)
    path = base / f"{run}-{attempt}-{rank}"
    for left in base.glob(f"{run}-*-{rank}"):  # of an attempt that was killed; only one runs at a time
        shutil.rmtree(left, ignore_errors=True)
    try:
        # What cannot be removed, such as another user's file, may stay: no name in here is used twice.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            raise FileExistsError(errno.EEXIST, "a link is there")
        path.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"network.scratch: cannot make {path} ({error.strerror}); set it to a local directory"
        ) from error
    return path


def remove_scratch(config: Config, run_name: str) -> None:
    """Remove what killed ranks of a run left on this node."""
    for left in _scratch_base(config).glob(f"{_scratch_name(config, run_name)}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _scratch_base(config: Config) -> Path:
    return Path(config.network.scratch or os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def _scratch_name(config: Config, run_name: str) -> str:
    whole = f"{os.getuid()}/{config.root}/{run_name}/{socket.gethostname()}"
    return f"gyre-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"
