"""Everything that is checked before anything starts. Every fault is a `UserError` of one line that says what to change.

Nothing here imports torch or an engine: bad input is answered within seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from gyre import models
from gyre.cell.stand_in_script import read as read_script
from gyre.config import Config
from gyre.errors import UserError
from gyre.launch import node
from gyre.launch.identity import Identity, het_groups
from gyre.launch.plan import Layout, Plan, count, plan
from gyre.tasks import load_tasks, task_file

#: Programs whose first argument is a file that has to exist.
_INTERPRETERS = re.compile(r"^(python[\d.]*|bash|sh|zsh|node|deno|bun|ruby|perl|Rscript|julia)$")
_LAST_PORT = 65535


def before_start(config: Config, cluster: str) -> None:
    """Check what a run needs on the machine that starts it.

    Args:
        config: the run.
        cluster: "local", or "slurm" where it is submitted from here.

    Raises:
        UserError: for the first thing that is wrong.
    """
    models.check(config.model.path, config.root)
    stages(config)
    load_tasks(task_file(config))
    if config.answers is not None:
        read_script(config.answers)
    harness(config)
    ports(config)
    if cluster == "slurm":
        slurm_is_there()
        plan(config)
    else:
        local_gpus(config)
        if config.network.interface:
            node.interface_address(config.network.interface)


def stages(config: Config) -> None:
    """Check that there are layers for every pipeline stage, where the model is here already."""
    layers = models.layers(config.model.path, config.root)
    if layers is not None and config.train.stages > layers:
        raise UserError(f"train.stages ({config.train.stages}) must be at most the model's layers ({layers})")


# -- the harness -----------------------------------------------------------------------------------------------------
def harness(config: Config) -> None:
    """Check that the harness's and the scorer's programs exist."""
    _command(config, config.harness.command, "harness.command")
    score = config.harness.score
    if score.command is not None:
        _command(config, score.command, "harness.score.command")
    if score.function is not None:
        _function(config, score.function)


def _command(config: Config, command: list[str], key: str) -> None:
    program, *arguments = [part.replace("{root}", config.root) for part in command] or [""]
    search = config.harness.env.get("PATH", os.environ.get("PATH", os.defpath))
    # It runs in a fresh workspace, where a relative path leads nowhere.
    if not program or ("/" in program and not program.startswith("/")):
        better = "{root}/" + program.removeprefix("./")
        raise UserError(f"{key}: {program!r} leads nowhere from a fresh workspace; write {better}")
    if shutil.which(program, path=search) is None:
        if Path(program).is_file():
            raise UserError(f"{key}: {program} is not executable; chmod +x it, or name its interpreter first")
        where = "no such file" if program.startswith("/") else "not found on PATH"
        raise UserError(f"{key}: {program!r} does not exist ({where}); install it or correct the command")
    if _INTERPRETERS.match(Path(program).name):
        script = arguments[0] if arguments else ""
        if script.startswith("/") and not Path(script).exists():
            raise UserError(f"{key}: there is no file {script}; correct the path")


def _function(config: Config, text: str) -> None:
    key = "harness.score.function"
    place, sign, name = text.replace("{root}", config.root).rpartition(":")
    if not sign or not place or not name.isidentifier():
        raise UserError(f"{key}: {text!r} is not module:name or /path/file.py:name; correct it")
    path = Path(config.root, place) if place.endswith(".py") else _module_file(config, place, key)
    if path is None:
        return  # of a compiled module: there, but not readable
    try:
        tree = ast.parse(path.read_text())
    except OSError as error:
        raise UserError(f"{key}: cannot read {path}: {error.strerror}; correct the path") from error
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{key}: {path} is not Python: {str(error).splitlines()[0]}") from error
    if name not in _names(tree):
        raise UserError(f"{key}: {path} has no {name}; define it or correct the name")


def _module_file(config: Config, module: str, key: str) -> Path | None:
    sys.path.insert(0, config.root)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.remove(config.root)
    if spec is None:
        raise UserError(f"{key}: there is no module {module!r}; install it, or write {{root}}/file.py:name")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _names(tree: ast.Module) -> set[str]:
    """What a module defines or imports at its top level."""
    names: set[str] = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            names.add(statement.id)
        elif isinstance(statement, ast.alias):
            names.add(statement.asname or statement.name)
    return names


# -- the machine -----------------------------------------------------------------------------------------------------
def ports(config: Config) -> None:
    """Check that all ranks' ports exist."""
    base, ranks = config.network.port_base, Layout.of(config).ranks
    last = base + ranks * node.PORTS_PER_RANK - 1
    if base and last > _LAST_PORT:
        raise UserError(
            f"network.port_base: {count(ranks, 'rank')} from {base} need ports up to {last}; "
            f"set it to {_LAST_PORT + base - last} or less, or to 0"
        )
    if base and base < 1024:
        raise UserError(f"network.port_base: {base} is a privileged port; set it to 1024 or more, or to 0")


def local_gpus(config: Config) -> None:
    """Check that this machine has the GPUs of all cells."""
    engines = Layout.of(config).engines
    needed, here = engines * config.cells.gpus, node.gpus_here()
    if here is not None and needed > here:
        raise UserError(
            f"{count(engines, 'cell')} with cells.gpus {config.cells.gpus} need {count(needed, 'GPU')}, and this "
            f"machine has {here}; set cells.gpus=0 to run on the CPU, or use --cluster slurm"
        )


def slurm_is_there() -> None:
    """Check that jobs can be submitted from here."""
    absent = [name for name in ("sbatch", "srun", "scontrol", "scancel") if shutil.which(name) is None]
    if absent:
        raise UserError(
            f"--cluster slurm: Slurm is not installed here ({', '.join(absent)} not found); "
            "run it on a login node, or with --cluster local"
        )


# -- an allocation ---------------------------------------------------------------------------------------------------
def allocation(config: Config, environ: Mapping[str, str]) -> Plan:
    """Compare what Slurm gave a batch script with what the configuration needs; returns the plan that fits.

    Het or not is the allocation's to say. Tasks and GPUs are compared per het group.

    Raises:
        UserError: they differ; the message says both.
    """
    groups = het_groups(environ)
    fitting = plan(config, het=groups > 0)
    needed = f"the configuration needs {_needs(fitting, config)}"
    if groups not in (0, len(fitting.components)):
        raise UserError(f"{needed}, but Slurm gave {count(groups, 'het group')}; use slurm/gyre.sbatch as it is")
    for index, component in enumerate(fitting.components):
        suffix = f"_HET_GROUP_{index}" if groups else ""
        nodes = _number(environ, f"SLURM_JOB_NUM_NODES{suffix}")
        tasks = _number(environ, f"SLURM_NTASKS{suffix}") or nodes
        enough = tasks == component.tasks if groups else tasks >= component.tasks
        if nodes != component.nodes or not enough:
            what = ("the cells", "the hosts")[index] if groups else "the job"
            raise UserError(
                f"{needed}, but Slurm gave {what} {count(nodes, 'node')} with {count(tasks, 'task')}; "
                f"change {_flags(fitting)} of sbatch, or cells.count, cells.standalone and hosts.count"
            )
    given = environ.get("SLURM_GPUS_ON_NODE")
    wanted = config.cells.gpus * fitting.cells_per_node
    if wanted and given is not None and given.isdigit() and int(given) < wanted:
        raise UserError(
            f"{needed}, but Slurm gave {count(int(given), 'GPU')} on a cell's node; "
            f"change --gres=gpu:{wanted} of sbatch, or cells.gpus"
        )
    return fitting


def world(config: Config, identity: Identity) -> None:
    """Check that as many ranks were started as the configuration has.

    Raises:
        UserError: they differ; the message says both.
    """
    layout = Layout.of(config)
    if identity.world_size != layout.ranks:
        raise UserError(
            f"the configuration needs {layout}, which are {count(layout.ranks, 'rank')}, but {identity.launcher} "
            f"started {identity.world_size}; change the tasks, or cells.count, cells.standalone and hosts.count"
        )


def _needs(fitting: Plan, config: Config) -> str:
    """For messages: "3 cells + 1 host (3 nodes with 3 tasks for the cells, 1 node with 1 task for the hosts)"."""
    parts = [f"{count(c.nodes, 'node')} with {count(c.tasks, 'task')}" for c in fitting.components]
    if wanted := config.cells.gpus * fitting.cells_per_node:
        parts[0] += f" and {count(wanted, 'GPU')} each"
    if fitting.het:
        parts = [f"{part} for the {who}" for part, who in zip(parts, ("cells", "hosts"), strict=True)]
    return f"{fitting.layout} ({', '.join(parts)})"


def _flags(fitting: Plan) -> str:
    """The sbatch options that would give a plan what it needs."""
    return " : ".join(
        f"--nodes={c.nodes}" + (f" --ntasks={c.tasks}" if c.tasks != c.nodes else "") for c in fitting.components
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    return int(re.match(r"\d*", environ.get(name, "")).group() or 0)  # type: ignore[union-attr]
