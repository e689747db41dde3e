"""What tests of several rooms share."""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _local_cluster():
    """The module slurm/local_cluster.py, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("local_cluster", ROOT / "slurm/local_cluster.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory):
    """A real Slurm with nodes gpu0-3 and cpu0-1; put its `environment` into that of what talks to it.

    Skips where Slurm is not installed, except in CI, where it has to be.
    """
    module = _local_cluster()
    if absent := module.missing():
        reason = f"Slurm is not installed ({', '.join(absent)} not found); install slurm-wlm and munge"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    cluster = module.LocalCluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()
    assert cluster.leftovers() == [], "jobs left processes behind"


@pytest.fixture(scope="session")
def fork_server():
    """A process that has imported vLLM; while it is there, every engine on a CPU is a fork of it, in every run."""
    from gyre.cell.engine_process import ZYGOTE_VARIABLE, start_server

    with tempfile.TemporaryDirectory(prefix="gyre-zygote-") as place, pytest.MonkeyPatch.context() as patch:
        address = f"{place}/socket"
        server = start_server(address, Path(place) / "log")
        patch.setenv(ZYGOTE_VARIABLE, address)
        yield address
        server.terminate()
        server.wait(30)


@pytest.fixture
def workplace(tmp_path):
    """A directory to start runs from, with the repository's launch scripts in it; its logs are thrown away."""
    place = tmp_path / "place"
    (place / "logs").mkdir(parents=True)
    shutil.copytree(ROOT / "slurm", place / "slurm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("launch.py", "gyre", "tests", "configs", "examples"):
        if (ROOT / name).exists():
            (place / name).symlink_to(ROOT / name)
    (place / ".venv").symlink_to(Path(sys.prefix))
    return place
