"""The share of the task's tests that pass once the agent's patch is applied to the repository as it was.

The patch alone counts: tests are the task's own, whatever the agent made of them.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORIES = Path(__file__).parent / "repositories"


def patch(workspace: Path) -> bytes:
    """What the agent changed, new files included."""
    subprocess.run(["git", "add", "--all"], cwd=workspace, check=True)
    command = ["git", "diff", "--cached", "--binary", "base"]
    return subprocess.run(command, cwd=workspace, check=True, capture_output=True).stdout


def score(workspace: Path, task: dict) -> float:
    """Between 0 and 1; 0 where the patch does not apply."""
    changed = patch(workspace)
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(REPOSITORIES / task["repository"], directory, dirs_exist_ok=True)
        apply = ["git", "apply", "--exclude=test_*.py", "--allow-empty"]
        if subprocess.run(apply, cwd=directory, input=changed).returncode:
            return 0.0
        tests = subprocess.run(
            [sys.executable, "-m", "unittest"], cwd=directory, capture_output=True, text=True, timeout=60
        )
    ran = re.search(r"^Ran (\d+) test", tests.stderr, re.MULTILINE)
    if ran is None or not int(ran[1]):
        return 0.0
    failed = sum(map(int, re.findall(r"(?:failures|errors)=(\d+)", tests.stderr.splitlines()[-1])))
    return 1 - failed / int(ran[1])
