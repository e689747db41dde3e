"""What a resume needs, published atomically: checkpoints/<version>/ counts once its COMMIT record is there.

    <version>/deepspeed/<tag>/   weights and optimizer state, as DeepSpeed saves them; a tag is never used twice
    <version>/model/             the same weights as a Hugging Face model, for whoever wants to use them
    <version>/random.pt          random states of the trainer
    <version>/cursor.json        where the scheduler was: groups dispatched, trained and dropped
    <version>/COMMIT             JSON: the fields of `Commit`; renamed into place last

DeepSpeed writes no `latest` file: a commit is loaded by the tag that its record names. A directory without
COMMIT is half a commit of an attempt that died, and is removed at the next start. A version is committed once and
never means two different weights (invariant 15).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gyre.config import Config
from gyre.errors import InvariantBroken, UserError, WeightsMismatch
from gyre.faults import fault
from gyre.run_dir import RunDir, read_json, sync_directory, write_atomic

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """The record of one commit."""

    version: int
    update: int  # updates done by then
    attempt: int
    tag: str
    checksum: str  # of the weights (`gyre.checksum`)
    division: dict[str, Any] = field(default_factory=dict)  # see `division`; nothing where an older version wrote it

    def deepspeed(self, run_dir: RunDir) -> Path:
        """Directory that DeepSpeed loads `tag` from."""
        return run_dir.checkpoint(self.version) / "deepspeed"

    def model(self, run_dir: RunDir) -> Path:
        """The weights as a Hugging Face model."""
        return run_dir.checkpoint(self.version) / "model"

    def cursor(self, run_dir: RunDir) -> Any:
        """What the scheduler put beside the weights."""
        return read_json(run_dir.checkpoint(self.version) / "cursor.json")


def division(config: Config) -> dict[str, Any]:
    """The settings that say which files a commit's weights and optimizer state are in, and what is in each."""
    train = config.train
    return {
        "train.kind": train.kind,
        "train.stages": train.stages,
        "train.shards": config.shards,
        "train.zero_stage": train.zero_stage,
        "model.dtype": config.model.dtype,
    }


def check_division(run_dir: RunDir, config: Config) -> None:
    """Check that the newest commit of a run, if there is one, can be loaded under its configuration.

    Raises:
        UserError: a setting is not that of the commit.
    """
    commit = latest(run_dir)
    now = division(config)
    for key, value in (commit.division if commit else {}).items():
        if now.get(key) != value:
            raise UserError(
                f"{key} is {now.get(key)}, and checkpoint {commit.version} was written with {value}: set {key} to "
                f"{value} in {run_dir.config}, or begin a new run with model.path={commit.model(run_dir)}"
            )


def read(run_dir: RunDir, version: int) -> Commit | None:
    """The commit of a version, or None where it is not committed."""
    record = read_json(run_dir.checkpoint(version) / "COMMIT")
    return Commit(**record) if record is not None else None


def latest(run_dir: RunDir) -> Commit | None:
    """The newest commit of a run."""
    versions = run_dir.commits()
    return read(run_dir, versions[-1]) if versions else None


def clean(run_dir: RunDir) -> list[int]:
    """Remove half commits; to be called before an attempt commits anything. Returns their versions."""
    known = set(run_dir.commits())
    halves = [p for p in run_dir.checkpoints.glob("*") if p.name.isdigit() and int(p.name) not in known]
    for path in halves:
        _remove(path)
    return sorted(int(path.name) for path in halves)


def write(
    run_dir: RunDir,
    commit: Commit,
    cursor: Any,
    save_state: Callable[[Path, str], None],
    save_model: Callable[[Path], None],
    keep: int,
) -> int:
    """Make a commit durable; returns its size in bytes.

    `save_state(directory, tag)` writes weights and optimizer, `save_model(directory)` the Hugging Face model. The
    latest `keep` commits stay.

    Raises:
        InvariantBroken: the version is committed already (invariant 15).
    """
    directory = run_dir.checkpoint(commit.version)
    if read(run_dir, commit.version) is not None:
        raise InvariantBroken(15, f"policy version {commit.version} is committed already")
    shutil.rmtree(directory, ignore_errors=True)
    commit.model(run_dir).mkdir(parents=True, exist_ok=True)
    fault(f"commit:{commit.version}:saving", 0)
    save_state(commit.deepspeed(run_dir), commit.tag)
    save_model(commit.model(run_dir))
    save_random_states(directory / "random.pt")
    (directory / "cursor.json").write_text(json.dumps(cursor))
    size = _sync_tree(directory)
    sync_directory(run_dir.checkpoints)
    fault(f"commit:{commit.version}:before_rename", 0)
    write_atomic(directory / "COMMIT", json.dumps(asdict(commit)), durable=True)
    prune(run_dir, keep)
    return size


def prune(run_dir: RunDir, keep: int) -> None:
    """Remove all but the latest `keep` commits. COMMIT goes first, so that half a removal is half a commit."""
    for version in run_dir.commits()[:-keep]:
        (run_dir.checkpoint(version) / "COMMIT").unlink()
        sync_directory(run_dir.checkpoint(version))
        _remove(run_dir.checkpoint(version))


def _remove(directory: Path) -> None:
    """Remove what can be removed: a file that somebody has open on NFS stays, and is no reason to end a run."""
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        log.warning("%s could not be removed wholly; without COMMIT it does not count", directory)


def _sync_tree(root: Path) -> int:
    """Make every file and directory under `root` durable; returns the bytes of the files."""
    size = 0
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
            with contextlib.closing(os.fdopen(descriptor)):
                os.fsync(descriptor)
                size += os.fstat(descriptor).st_size
        sync_directory(Path(directory))
    return size


def save_random_states(path: Path) -> None:
    """Write the random states of this process."""
    import numpy
    import torch

    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    torch.save(states, path)


def load_random_states(path: Path) -> None:
    """Take up the random states of a commit."""
    import numpy
    import torch

    states = torch.load(path, weights_only=False)
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


def restore(
    run_dir: RunDir, commit: Commit, load_state: Callable[[Path, str], None], checksum: Callable[[], str]
) -> None:
    """Load a commit and check that it gave the weights that were committed (invariant 15).

    Raises:
        WeightsMismatch: it did not.
    """
    load_state(commit.deepspeed(run_dir), commit.tag)
    found = checksum()
    if found != commit.checksum:
        raise WeightsMismatch(f"commit {commit.version} has checksum {commit.checksum}, loading it gave {found}")
    load_random_states(run_dir.checkpoint(commit.version) / "random.pt")
