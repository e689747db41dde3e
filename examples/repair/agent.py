"""Has mini-swe-agent solve the task: a Git repository in the workspace, in which tests fail.

mini-swe-agent is used as it is (`.venv/bin/pip install mini-swe-agent==2.4.6`); it finds the model by OPENAI_BASE_URL.
What it changed is in the workspace, and its conversation in .git/trajectory.json.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORIES = Path(__file__).parent / "repositories"


def git(*arguments: str) -> None:
    """Run git quietly, as somebody."""
    who = ("-c", "user.name=gyre", "-c", "user.email=gyre@localhost")
    subprocess.run(["git", *who, *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Make the repository, and become the agent."""
    task = json.loads(Path(os.environ["GYRE_TASK"]).read_text())
    if (program := shutil.which("mini")) is None:
        sys.exit("mini is not on PATH; .venv/bin/pip install mini-swe-agent==2.4.6")
    shutil.copytree(REPOSITORIES / task["repository"], ".", dirs_exist_ok=True)
    git("init", "-b", "main")
    git("add", "--all")
    git("commit", "-m", "as it was")
    git("tag", "base")
    environment = {
        **os.environ,
        "MSWEA_CONFIGURED": "true",  # it asks for its settings otherwise
        "MSWEA_GLOBAL_CONFIG_DIR": os.environ["TMPDIR"],
        "MSWEA_COST_TRACKING": "ignore_errors",  # nobody has a price for a model in training
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # so it need not look for one in the network
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = ["mini", "--yolo", "--exit-immediately", "--cost-limit", "0", "--output", ".git/trajectory.json"]
    command += ["--model", f"openai/{os.environ['GYRE_MODEL']}", "--task", task["problem"]]
    os.execve(program, command, environment)


main()
