"""A rank program that computes nothing: it says who it is, and waits, so that launching can be tested alone."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from gyre.config import load
from gyre.launch import node
from gyre.launch.identity import identify


def main(run_dir: str) -> int:
    """Write who this rank is, sleep TRIVIAL_SECONDS or until the file `go` is there, return TRIVIAL_CODE_<rank>.

    With TRIVIAL_LEAVES its scratch stays, as that of a rank which was ended while it started.
    """
    run = Path(run_dir)
    who = identify(os.environ)

    def leave(number: int, frame: object) -> None:
        (run / f"left-{who.restarts}-{who.rank}").touch()
        sys.exit(130)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("TRIVIAL_STUBBORN") else leave)
    facts = {**who.__dict__, "pid": os.getpid(), "path": os.environ["PATH"]}
    temporary = run / f".seen-{who.restarts}-{who.rank}"
    temporary.write_text(json.dumps(facts))
    temporary.rename(run / f"seen-{who.restarts}-{who.rank}.json")
    deadline = time.monotonic() + float(os.environ.get("TRIVIAL_SECONDS", "0"))
    while time.monotonic() < deadline and not (run / "go").exists():
        time.sleep(0.05)
    if os.environ.get("TRIVIAL_LEAVES"):
        late = node.scratch(load(run / "config.yaml"), run.name, 1, who.rank) / "late"
        late.mkdir()
        (run / f"late-{who.rank}").write_text(str(late))
    print(os.environ.get("TRIVIAL_SAYS", f"rank {who.rank} ends"), flush=True)
    if who.rank == 0 and os.environ.get("TRIVIAL_COMPLETED"):
        with open(run / "events.jsonl", "a") as log:
            log.write('{"kind":"run_ended","how":"completed","detail":"","t":0,"attempt":1}\n')
    return int(os.environ.get(f"TRIVIAL_CODE_{who.rank}", "0"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
