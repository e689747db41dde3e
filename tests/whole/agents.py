"""Agents from the package index, in an environment of their own, so that none of them is a requirement of Gyre."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("agents.txt")


def environment() -> Path:
    """Directory of the environment, made where it is missing or out of date (12 s): on top of the one tests run in."""
    home = Path(sys.prefix) / "agents"
    stamp = home / hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            shutil.rmtree(home, ignore_errors=True)
            _run(sys.executable, "-m", "venv", "--without-pip", str(home))
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            base = home / "lib" / version / "site-packages" / "base.pth"
            base.write_text(sysconfig.get_paths()["purelib"] + "\n")
            pip = (str(home / "bin/python"), "-m", "pip", "--disable-pip-version-check")
            _run(*pip, "install", "--no-deps", "--requirement", str(REQUIREMENTS))
            stamp.touch()
    return home


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
