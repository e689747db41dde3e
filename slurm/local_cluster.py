#!/usr/bin/env python3
"""A throw-away Slurm cluster on this machine: munged, slurmctld and six slurmd, in a directory and on ports of its own.

    slurm/local_cluster.py start DIR      prints the line to put into the environment (SLURM_CONF)
    slurm/local_cluster.py stop DIR       cancels the jobs, ends every daemon and whatever jobs left behind
    slurm/local_cluster.py run DIR -- COMMAND...    start, run a command with SLURM_CONF set, stop

Its nodes are called gpu0..gpu3 (partition gpu, the default, one fake GPU each) and cpu0, cpu1 (partition cpu). It is a
real Slurm, as Debian's packages slurm-wlm and munge bring it, and needs nothing from the project. Other clusters on
the same machine are not touched. Meant for root in tests; another user's jobs run as that user.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

GPU_NODES = 4
CPU_NODES = 2
NODES = [f"gpu{i}" for i in range(GPU_NODES)] + [f"cpu{i}" for i in range(CPU_NODES)]
DAEMONS = ("munged", "slurmctld", "slurmd")
_MARK = "GYRE_LOCAL_CLUSTER"
_PATH = f"/usr/sbin:/sbin:{os.environ.get('PATH', '/usr/bin:/bin')}"


class ClusterError(Exception):
    """The cluster cannot be started; the message says why."""


def missing() -> list[str]:
    """Programs that a cluster needs and that are not installed; empty when all are there."""
    return [name for name in (*DAEMONS, "sbatch", "scontrol") if shutil.which(name, path=_PATH) is None]


def _free_block(size: int) -> int:
    """First of `size` free consecutive ports, below the range from which the system chooses."""
    for _ in range(200):
        base = random.randrange(15000, 32000 - size)
        sockets = []
        try:
            for port in range(base, base + size):
                sockets.append(socket.socket())
                sockets[-1].bind(("", port))
            return base
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise ClusterError("found no free ports for a Slurm cluster")


class LocalCluster:
    """One cluster in one directory, which must be as good as empty at the start and is kept (logs) at the end."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory).resolve()
        self.conf = self.directory / "slurm.conf"
        self._pids = self.directory / "pids.json"
        # A Unix socket's path may not be longer than 107 bytes, and test directories are long.
        self._socket_directory = self.directory / "munge"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment so that sbatch and the others talk to this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    # -- start -----------------------------------------------------------------------------------------------------
    def start(self, timeout: float = 60.0) -> None:
        """Start every daemon and wait until all nodes are idle.

        Raises:
            ClusterError: Slurm is not installed, or a daemon does not come up; nothing is left running.
        """
        if absent := missing():
            raise ClusterError(f"Slurm is not installed ({', '.join(absent)} not found); install slurm-wlm and munge")
        if self._pids.exists():
            raise ClusterError(f"a cluster runs in {self.directory}; stop it first")
        for name in ("ctld", *NODES):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        munge_socket = self._start_munged()
        self._write_configuration(_free_block(1 + len(NODES)), munge_socket)
        self._spawn("slurmctld", ["slurmctld", "-D", "-c"])
        for node in NODES:
            self._spawn(node, ["slurmd", "-D", "-N", node])
        # Het jobs are started by the backfill scheduler alone, which looks again only after something has changed; on a
        # quiet cluster the end of a requeued job's delay is not noticed. A busy cluster needs no such help.
        nudge = "while sleep 1; do scontrol update PartitionName=cpu State=UP; done"
        self._spawn("nudge", ["bash", "-c", nudge])
        deadline = time.monotonic() + timeout
        while self._idle_nodes() < len(NODES):
            if time.monotonic() > deadline:
                logs = self.directory
                self.stop()
                raise ClusterError(f"the Slurm cluster did not come up in {timeout:g} s; its logs are in {logs}")
            time.sleep(0.2)

    def _start_munged(self) -> Path:
        """Start an authentication daemon with a key and a socket of its own."""
        place = self._socket_directory
        if len(str(place)) > 80:
            place = Path(f"/tmp/gyre-munge-{secrets.token_hex(6)}")
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        key = place / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={place / name}" for option, name in files.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *options], directory=str(place))
        deadline = time.monotonic() + 20
        while not (place / "socket").exists():
            if time.monotonic() > deadline:
                self.stop()
                raise ClusterError(f"munged did not start; see {self.directory / 'munged.out'}")
            time.sleep(0.05)
        return place / "socket"

    def _write_configuration(self, port: int, munge_socket: Path) -> None:
        here = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.getuid()).pw_name
        cpus = max(4, os.cpu_count() or 1)
        lines = [
            "ClusterName=gyre",
            f"SlurmctldHost={here}(127.0.0.1)",
            f"SlurmctldPort={port}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            # A credential's life is also how long a requeued job is held back, two minutes by default.
            f"AuthInfo=socket={munge_socket},cred_expire=5",
            "CredType=cred/munge",
            f"StateSaveLocation={self.directory}/ctld",
            f"SlurmdSpoolDir={self.directory}/%n",
            f"SlurmctldPidFile={self.directory}/ctld.pid",
            f"SlurmdPidFile={self.directory}/%n.pid",
            f"SlurmctldLogFile={self.directory}/ctld.log",
            f"SlurmdLogFile={self.directory}/%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "ReturnToService=2",
            "KillWait=10",
            "MpiDefault=none",
            "GresTypes=gpu",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000",
        ]
        hardware = f"NodeHostname={here} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000 State=UNKNOWN"
        for i, node in enumerate(NODES):
            gres = " Gres=gpu:1" if node.startswith("gpu") else ""
            lines.append(f"NodeName={node} Port={port + 1 + i} {hardware}{gres}")
        lines.append(f"PartitionName=gpu Nodes=gpu[0-{GPU_NODES - 1}] Default=YES MaxTime=INFINITE State=UP")
        lines.append(f"PartitionName=cpu Nodes=cpu[0-{CPU_NODES - 1}] MaxTime=INFINITE State=UP")
        self.conf.write_text("\n".join(lines) + "\n")
        # A count without a file drains the nodes; any device file will do.
        gres = f"NodeName=gpu[0-{GPU_NODES - 1}] Name=gpu File=/dev/null\n"
        (self.directory / "gres.conf").write_text(gres)

    def _spawn(self, name: str, command: list[str], **extra: str) -> None:
        env = {**os.environ, **self.environment, "PATH": _PATH, _MARK: str(self.directory)}
        with open(self.directory / f"{name}.out", "ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
            )
        known = json.loads(self._pids.read_text()) if self._pids.exists() else {}
        known[name] = {"pid": process.pid, **extra}
        self._pids.write_text(json.dumps(known))

    # -- use -------------------------------------------------------------------------------------------------------
    def call(self, *command: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands against this cluster; never raises for its exit code."""
        env = {**os.environ, **self.environment, "PATH": _PATH}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)

    def _idle_nodes(self) -> int:
        answer = self.call("sinfo", "-h", "-N", "-o", "%N %T")
        return sum(line.split()[-1] == "idle" for line in answer.stdout.splitlines() if line.strip())

    # -- stop ------------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Cancel every job, end every daemon, and kill what jobs left behind. May be called twice."""
        daemons = json.loads(self._pids.read_text()) if self._pids.exists() else {}
        if "slurmctld" in daemons and self.conf.exists() and _runs(daemons["slurmctld"]["pid"]):
            self._cancel_jobs()
        pids = [entry["pid"] for name, entry in daemons.items() if name != "munged"]
        _end(pids)
        _end([entry["pid"] for name, entry in daemons.items() if name == "munged"])
        _end(self.leftovers())
        place = daemons.get("munged", {}).get("directory")
        if place and Path(place) != self._socket_directory:
            shutil.rmtree(place, ignore_errors=True)
        self._pids.unlink(missing_ok=True)

    def _cancel_jobs(self, timeout: float = 20.0) -> None:
        try:
            ids = self.call("squeue", "-h", "-o", "%A").stdout.split()
            if ids:
                self.call("scancel", "--full", *ids)
            deadline = time.monotonic() + timeout
            while self.call("squeue", "-h", "-o", "%A").stdout.split() and time.monotonic() < deadline:
                time.sleep(0.2)
        except subprocess.TimeoutExpired:
            pass  # the controller hangs; it and the jobs' processes are killed next

    def leftovers(self) -> list[int]:
        """Processes of this cluster's steps and jobs that outlived their daemons."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                variables = set((entry / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue  # it ended, or is another user's
            ours = f"SLURM_CONF={self.conf}".encode() in variables
            in_job = any(one.startswith(b"SLURM_JOB_ID=") for one in variables)
            if f"{_MARK}={self.directory}".encode() in variables or (ours and in_job):
                found.append(int(entry.name))
        return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass  # it was started by an earlier command


def _end(pids: list[int], grace: float = 10.0) -> None:
    """SIGTERM, then after `grace` seconds SIGKILL."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            for pid in pids:
                _reap(pid)
            pids = [pid for pid in pids if _runs(pid)]
            if not pids:
                return
            time.sleep(0.05)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="A throw-away Slurm cluster on this machine.")
    parser.add_argument("action", choices=("start", "stop", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for run, after --")
    options = parser.parse_args()
    cluster = LocalCluster(options.directory)
    try:
        if options.action == "stop":
            cluster.stop()
            return 0
        cluster.start()
        if options.action == "start":
            print(" ".join(f"export {key}={shlex.quote(value)}" for key, value in cluster.environment.items()))
            return 0
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        try:
            return subprocess.run(command, env={**os.environ, **cluster.environment}, check=False).returncode
        finally:
            cluster.stop()
    except ClusterError as error:
        print(f"local_cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
