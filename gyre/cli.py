"""The commands. Parsing comes first and imports nothing; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gyre.errors import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER, UserError

if TYPE_CHECKING:
    from gyre.config import Config
    from gyre.run_dir import RunDir

_DESCRIPTION = "Online reinforcement learning for long-horizon LLM agents."
_OVERRIDES = "key=value on the command line overrides the configuration, for example train.updates=6"


class _Parser(argparse.ArgumentParser):
    """Faults of the command line in one line, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        print(f"gyre: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(EXIT_USER)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="launch.py", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, what: str | None, metavar: str = "RUN_DIR") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, epilog=what)
        command.add_argument("target", metavar=metavar)
        return command

    run = add("run", "start a run and watch it; Ctrl-C stops it", _OVERRIDES, "CONFIG")
    run.add_argument("--name", help="the run's directory is logs/NAME instead of logs/<name>-<time>")
    resume = add("resume", "go on with a run from its last commit", "its settings are those in RUN_DIR/config.yaml")
    what = "an update with learning rate 0: do engine and trainer agree on log-probabilities?"
    selftest = add("selftest", what, _OVERRIDES, "CONFIG")
    selftest.add_argument("--json", metavar="OUT", help="also write the figures to OUT")
    for command, default in ((run, "local"), (selftest, "local"), (resume, None)):
        command.add_argument("--cluster", choices=("local", "slurm"), default=default, help="where to start the ranks")
    for command in (run, resume):
        command.add_argument("--detach", action="store_true", help="with Slurm: return once the job is submitted")
    add("sbatch", "print the batch script that run --cluster slurm would submit", _OVERRIDES, "CONFIG")
    add("watch", "show a run, wherever it was started from", None)
    report = add("report", "print the summary of a run", None)
    report.add_argument("--html", metavar="OUT", help="also write its timeline to OUT, as one HTML file")
    report.add_argument("--json", metavar="OUT", help="also write its numbers to OUT, as docs/what-you-see.md says")
    report.add_argument("--trace", metavar="OUT", help="also write its trace to OUT, as docs/traces.md says")
    _simulation(commands)
    _planning(commands)
    prepare = add("prepare", "inside an allocation: print what slurm/gyre.sbatch runs", _OVERRIDES, "CONFIG|RUN_DIR")
    prepare.add_argument("--resume", action="store_true", help="go on with the run in RUN_DIR")
    ended = add("ended", "inside an allocation: the exit code of a job whose step ended with CODE", None)
    ended.add_argument("code", type=int, metavar="CODE")
    return parser


def _simulation(commands: Any) -> None:
    text = "compare scheduling policies on a trace, in virtual time"
    simulate = commands.add_parser("simulate", help=text, description=text, epilog="docs/simulate.md says more")
    option = simulate.add_argument
    option("--trace", required=True, metavar="FILE", help="executions' durations, as in docs/traces.md")
    option("--cells", type=int, required=True, help="GPU cells")
    option("--slots", type=int, required=True, help="live executions of a cell's engine")
    option("--batch-groups", type=int, required=True, help="groups of a batch")
    option("--updates", type=int, default=24, help="batches of a run (24)")
    option("--lookahead", type=float, default=0.25, help="executions outstanding beyond the batch, in batches (0.25)")
    option("--train-ratio", type=float, help="training work by rollout work; without it, the trace's train_s")
    option("--switch", default="8.5,3.5", metavar="TO,BACK", help="seconds of a move to training and back (8.5,3.5)")
    option("--policy", default="elastic,colocate,async,async-stream", help="policies, the first one is compared with")
    option("--repeats", type=int, default=12, help="shuffles of the trace's groups (12)")
    option("--seed", type=int, default=0, help="of the shuffles, and of what is left to chance (0)")
    option("--in-order", action="store_true", help="take the groups in the trace's order, without shuffling")
    option("--supply-fraction", type=float, default=0.25, help="as scheduler.supply_fraction (0.25)")
    option("--supply-hold", type=float, default=10.0, help="as scheduler.supply_hold, in seconds (10)")
    option("--slowdown", type=float, default=0.0, help="of an engine by each further live execution (0)")
    option("--failed", type=float, default=0.0, metavar="P", help="probability that an execution yields nothing")
    option("--try-failed", type=float, default=0.0, metavar="P", help="probability that a try fails and is repeated")
    option("--timeout", type=float, metavar="S", help="seconds after which an execution is ended")
    option("--cell-failures", type=int, default=0, metavar="N", help="satellites that fail over a run")
    option("--workers", type=int, default=os.cpu_count() or 1, help="processes (one per core)")
    option("--json", metavar="OUT", help="write the figures to OUT")
    option("--html", metavar="OUT", help="write the first repeat of every policy to OUT, as one page")


def _planning(commands: Any) -> None:
    text = "say how to divide GPUs for a trace, by simulating what could be done with them"
    option = commands.add_parser("plan", help=text, description=text, epilog="docs/plan.md says more").add_argument
    option("--trace", required=True, metavar="FILE", help="executions' durations, as in docs/traces.md")
    option("--gpus", type=int, required=True, help="all there are")
    option("--min-gpus-per-cell", type=int, default=1, metavar="G", help="what the model needs at the least (1)")
    option("--gpus-per-cell", metavar="G,G", help="sizes to try (powers of two up to 8 that divide --gpus)")
    option("--slots", default="4,8,16", metavar="S,S", help="live executions to a GPU, to try (4,8,16)")
    option("--batch-groups", metavar="B,B", help="groups of a batch, to try (powers of two around all slots)")
    option("--lookahead", default="0,0.125,0.25,0.5,1", metavar="L,L", help="in batches, to try (0,0.125,0.25,0.5,1)")
    option("--slowdown", type=float, default=0.02, help="of a GPU by each further live execution (0.02)")
    option("--trace-slots", type=int, default=4, metavar="S", help="live executions to a GPU in the trace (4)")
    option("--trace-gpus", type=int, default=1, metavar="G", help="GPUs of a cell in the trace, for its train_s (1)")
    option("--train-ratio", type=float, help="training by rollout work at --trace-slots; without it, train_s")
    option("--switch", default="8.5,3.5", metavar="TO,BACK", help="seconds of a move to training and back (8.5,3.5)")
    option("--max-staleness", type=int, metavar="V", help="policy versions that no group may exceed")
    option("--mean-staleness", type=float, metavar="V", help="policy versions that the mean may not exceed")
    option("--tolerance", type=float, default=0.02, help="throughput given up for less staleness (0.02)")
    option("--updates", type=int, default=6, help="batches of the largest size to measure finalists over (6)")
    option("--repeats", type=int, default=4, help="shuffles of the trace's groups, of finalists (4)")
    option("--seed", type=int, default=0, help="of the shuffles (0)")
    option("--workers", type=int, default=os.cpu_count() or 1, help="processes (one per core)")
    option("--json", metavar="OUT", help="write all that was found to OUT")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    takes_overrides = options.command in ("run", "selftest", "sbatch") or (
        options.command == "prepare" and not options.resume
    )
    for word in rest:
        resumed = not takes_overrides and options.command in ("resume", "prepare")
        if resumed and "=" in word and not word.startswith("-"):
            parser.error(
                f"a run goes on with the settings in its config.yaml, without {word!r}; to train with others, "
                "run a new one (its model.path may be a checkpoint of this one)"
            )
        if word.startswith("-") or not takes_overrides:
            parser.error(f"unknown argument {word!r}")
    options.overrides = rest
    if options.command in ("run", "resume") and options.detach and options.cluster == "local":
        parser.error("--detach is for --cluster slurm: a local run ends with whoever started it")
    return options


# -- commands --------------------------------------------------------------------------------------------------------
def _run(options: argparse.Namespace) -> int:
    from gyre.config import load
    from gyre.launch import check, directory

    overrides = [*options.overrides, *([f"name={json.dumps(options.name)}"] if options.name is not None else [])]
    config = load(options.target, overrides)
    check.before_start(config, options.cluster)
    run = directory.create(config, named=bool(options.name))
    return _start(run, config, options.cluster, options.detach, fresh=True)


def _resume(options: argparse.Namespace) -> int:
    from gyre.checkpoint import check_division
    from gyre.launch import check, directory

    run, config = directory.open_run(options.target)
    check_division(run, config)
    cluster = options.cluster or directory.cluster_of(run)
    check.before_start(config, cluster)
    directory.refuse_running(run)
    return _start(run, config, cluster, options.detach)


def _start(run: RunDir, config: Config, cluster: str, detach: bool, fresh: bool = False) -> int:
    if detach and cluster == "local":
        raise UserError("--detach is for --cluster slurm: a local run ends with whoever started it")
    from gyre.launch import directory
    from gyre.launch.follow import follow, last_attempt, say
    from gyre.launch.jobs import start

    after = last_attempt(run)
    try:
        job = start(run, config, cluster)
    except UserError:
        if fresh:  # nothing has begun in it
            shutil.rmtree(run.path)
        raise
    try:
        directory.record_start(run, cluster, job.id)
        say(f"run {run.path}" + (f", Slurm job {job.id}" if cluster == "slurm" else ""))
        if detach:
            say(f"watch it with: launch.py watch {run.path}")
            return EXIT_OK
        return follow(run, job, after)
    except BaseException:  # whatever it is, nobody will look after the job from here
        job.stop()
        raise


def _selftest(options: argparse.Namespace) -> int:
    from gyre.launch import selftest

    def start(run: RunDir, config: Config) -> int:
        return _start(run, config, options.cluster, detach=False, fresh=True)

    return selftest.run(options.target, options.overrides, options.cluster, options.json, start)


def _sbatch(options: argparse.Namespace) -> int:
    from gyre.config import load
    from gyre.launch import check, directory, executors
    from gyre.launch.plan import plan

    config = load(options.target, options.overrides)
    check.ports(config)
    run = directory.path_of(config)
    folder = run / "launch" / "<time>"
    command = executors.submitit_command(config, folder)
    sys.stdout.write(executors.submission_text(config, plan(config), run, folder, command))
    return EXIT_OK


def _watch(options: argparse.Namespace) -> int:
    from gyre.progress import watch

    watch(options.target)
    return EXIT_OK


def _report(options: argparse.Namespace) -> int:
    from gyre.launch import directory
    from gyre.report import report, summarise

    run, _ = directory.open_run(options.target)
    if any(out is not None for out in (options.html, options.trace, options.json)):
        from gyre.outputs import distinct, write
        from gyre.timeline_page import run_page

        read = {"the run's events.jsonl": run.events, "the run's config.yaml": run.config}
        distinct(read, {"--html": options.html, "--trace": options.trace, "--json": options.json})
        if options.json is not None:
            write(options.json, json.dumps(summarise(run), indent=2) + "\n")
        if options.trace is not None:
            write(options.trace, _trace(run))
        if options.html is not None:
            write(options.html, run_page(run))
    print(report(run.path, colour=sys.stdout.isatty()), end="")
    return EXIT_OK


def _trace(run: RunDir) -> str:
    """The trace of a run, as its directory has it now: running, over, or killed."""
    from gyre.simulate.trace import export

    lines = export(run)
    if not lines:
        raise UserError(f"no group of {run.path} is whole yet, so there is no trace; let the run finish a few groups")
    return "".join(json.dumps(line) + "\n" for line in lines)


def _simulate(options: argparse.Namespace) -> int:
    from gyre.simulate.command import run

    return run(options)


def _plan(options: argparse.Namespace) -> int:
    from gyre.simulate.plan_command import run

    return run(options)


def _prepare(options: argparse.Namespace) -> int:
    from gyre.launch.prepare import prepare

    sys.stdout.write(prepare(options.target, options.overrides, options.resume, dict(os.environ)))
    return EXIT_OK


def _ended(options: argparse.Namespace) -> int:
    from gyre.launch.follow import job_code
    from gyre.run_dir import RunDir

    return job_code(RunDir(options.target), options.code)


_COMMANDS = {
    "run": _run,
    "resume": _resume,
    "selftest": _selftest,
    "sbatch": _sbatch,
    "watch": _watch,
    "report": _report,
    "simulate": _simulate,
    "plan": _plan,
    "prepare": _prepare,
    "ended": _ended,
}


# -- the edge of the process -----------------------------------------------------------------------------------------
def _use_this_python() -> None:
    """Put this interpreter's directory first in PATH, so that `python` in a harness command is the same one."""
    here = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != here:
        os.environ["PATH"] = os.pathsep.join([here, path])


def _keep_traceback(command: str) -> Path:
    """Write the present exception's traceback to a file, and return its path."""
    import tempfile

    name = f"gyre-{command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for directory in (Path("logs"), Path(tempfile.gettempdir())):
        try:
            (directory / name).write_text(traceback.format_exc())
            return (directory / name).resolve()
        except OSError:
            continue
    return Path(os.devnull)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 completed, 1 fault, 2 bad input, 130 interrupted."""
    options = _parse(arguments)
    _use_this_python()
    try:
        return _COMMANDS[options.command](options)
    except UserError as error:
        print("gyre:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        return EXIT_OK if options.command == "watch" else EXIT_INTERRUPTED
    except BrokenPipeError:  # of a pager or head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:  # whatever else it is: one line for the person, the traceback for a bug report
        path = _keep_traceback(options.command)
        line = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"gyre: internal fault: {line}; the traceback is in {path}", file=sys.stderr)
        return EXIT_FAULT


if __name__ == "__main__":
    sys.exit(main())
