"""A rank program that computes nothing: it says who it is, and waits, so that launching can be tested alone."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from gyre.launch.identity import identify


def main(run_dir: str) -> int:
    """Write who this rank is, sleep as long as the file `seconds` says, and return what the file `code` says."""
    run = Path(run_dir)
    who = identify(os.environ)

    def leave(number: int, frame: object) -> None:
        (run / f"left-{who.restarts}-{who.rank}").touch()
        sys.exit(130)

    signal.signal(signal.SIGTERM, leave)
    facts = {**who.__dict__, "pid": os.getpid(), "submitit": os.environ.get("SUBMITIT_EXECUTOR")}
    temporary = run / f".seen-{who.restarts}-{who.rank}"
    temporary.write_text(json.dumps(facts))
    temporary.rename(run / f"seen-{who.restarts}-{who.rank}.json")
    deadline = time.monotonic() + _number(run / "seconds", 0.0)
    while time.monotonic() < deadline and not (run / "go").exists():
        time.sleep(0.05)
    print(f"rank {who.rank} ends", flush=True)
    return int(_number(run / f"code-{who.rank}", 0))


def _number(path: Path, default: float) -> float:
    text = os.environ.get(f"TRIVIAL_{path.name.upper().replace('-', '_')}")
    return float(text) if text else default


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
