"""The whole configuration of a run, typed. Pure: no clock, no torch; files are read only by `load`.

One YAML file, then `key=value` overrides from the command line, become one immutable `Config`. Unknown keys are
errors that name the nearest known one. The resolved configuration is saved in the run directory, and everything
after the launch reads it from there.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from gyre.config_section import Section
from gyre.config_train import TrainConfig
from gyre.errors import UserError


class ModelConfig(Section):
    """The model that is trained."""

    path: str = Field(
        description="Directory with a Hugging Face model (safetensors, tokenizer, chat template), or a model that "
        "Gyre can make itself: gyre:tiny, gyre:smollm2-135m-instruct; gyre:timed where engine and trainer are timed."
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Type of weights in engines and trainers.")
    max_context: int = Field(4096, ge=32, description="Tokens of prompt and answer together, per request.")


class TasksConfig(Section):
    """The tasks that executions run."""

    path: str = Field(description="JSON Lines: one object a line with an `id`; the rest is the harness's business.")
    shuffle: bool = Field(True, description="Visit the tasks in a seeded random order, another one every round.")


class LimitsConfig(Section):
    """Limits of one harness process group; null means none."""

    memory_mb: int | None = Field(None, ge=16, description="Address space of one harness process, in MiB.")
    files: int | None = Field(None, ge=16, description="Open files of one harness process.")
    output_mb: int = Field(64, ge=1, description="Harness output kept in its log, in MiB; the rest is dropped.")


class ScoreConfig(Section):
    """How a finished execution is scored: exactly one of command and function."""

    command: list[str] | None = Field(
        None, description='Runs in the workspace; its last line of output is a number or {"score": number}.'
    )
    function: str | None = Field(
        None, description="module:name or /path/file.py:name, called (workspace, task) -> float."
    )
    timeout: float = Field(60.0, gt=0, description="Seconds that scoring may take.")

    @model_validator(mode="after")
    def _one_of(self) -> ScoreConfig:
        if (self.command is None) == (self.function is None):
            raise ValueError("give exactly one of command and function")
        return self


class HarnessConfig(Section):
    """The user's agent: any command that talks to an OpenAI- or Anthropic-style endpoint."""

    command: list[str] = Field(
        min_length=1, description="Started in a fresh workspace. {root} is where Gyre was started."
    )
    timeout: float = Field(600.0, gt=0, description="Seconds an execution may take, waiting for engines not counted.")
    tries: int = Field(2, ge=1, description="Tries of an execution when the infrastructure fails it.")
    score: ScoreConfig
    env: dict[str, str] = Field(default_factory=dict, description="Extra environment of the harness.")
    models: list[Annotated[str, Field(pattern=r"^\S+$")]] = Field(
        default_factory=list,
        description="Names beside its own under which the model is answered to agents that insist on one; `*` stands "
        "for any part of a name.",
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    keep_workspaces: Literal["all", "failed", "none"] = Field("failed", description="Workspaces kept after scoring.")


class CellsConfig(Section):
    """The GPU cells."""

    count: int = Field(ge=1, description="Cells, each the GPUs of one rank, changing role together.")
    slots: int = Field(ge=1, description="Live executions that one cell's engine serves.")
    standalone: int = Field(0, ge=0, description="Further ranks like a cell's that only ever serve rollout.")
    gpus: int = Field(1, ge=0, description="GPUs of one cell, all on one node; 0 runs on the CPU.")


class HostsConfig(Section):
    """The harness hosts, one rank per CPU node."""

    count: int = Field(1, ge=1, description="Harness hosts.")
    executions: int = Field(256, ge=1, description="Live executions that one host runs at the most.")


class TimedEngineConfig(Section):
    """How fast a timed engine is; it computes nothing."""

    tokens_per_second: float = Field(20.0, gt=0, le=1e6, description="Tokens that a request alone gets in a second.")
    slowdown: float = Field(
        0.0,
        ge=0,
        description="Of k live requests each gets tokens_per_second / (1 + slowdown x (k - 1)); with 0 a slot's time "
        "does not depend on the others, with 1 the engine's tokens are shared.",
    )
    sleep_seconds: float = Field(0.0, ge=0, le=600, description="Seconds that giving the memory to the trainer takes.")
    wake_seconds: float = Field(0.0, ge=0, le=600, description="Seconds that taking it back takes, before the load.")


class ScriptedEngineConfig(Section):
    """The answers that a scripted engine replays; docs/scripted-engine.md has the format."""

    answers: str = Field(min_length=1, description="JSON Lines: an answer a line, and when it is given.")
    tokens_per_second: float = Field(
        5000.0, gt=0, le=1e6, description="Tokens that each request gets in a second; a token is a byte."
    )


class EngineConfig(Section):
    """The inference engine of a cell."""

    kind: Literal["vllm", "timed", "scripted"] = Field(
        "vllm",
        description="The engine behind the gate; timed: a server that emits tokens at a configured rate; scripted: one "
        "that replays the answers of a file. Neither of them needs a model or a GPU.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Further vLLM server flags, without the dashes: {max-num-seqs: 16}."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Extra environment of the engine process.")
    start_timeout: float = Field(900.0, gt=0, description="Seconds an engine, or a trainer, may take to start.")
    timed: TimedEngineConfig | None = Field(None, description="With kind timed: how fast it is.")
    scripted: ScriptedEngineConfig | None = Field(None, description="With kind scripted: what it answers.")

    @model_validator(mode="after")
    def _of_a_kind(self) -> EngineConfig:
        for name in ("timed", "scripted"):
            if getattr(self, name) is not None and self.kind != name:
                raise ValueError(
                    f"{name} has no effect with kind {self.kind}; set engine.kind={name}, or remove engine.{name}"
                )
        if self.kind == "scripted" and self.scripted is None:
            raise ValueError("scripted.answers is missing; kind scripted replays the answers of that file")
        if self.args and self.kind != "vllm":
            raise ValueError(f"args are flags of vLLM, which kind {self.kind} does not run; remove engine.args")
        return self

    @property
    def pace(self) -> TimedEngineConfig | None:
        """How fast an engine without a model is; None where it has one."""
        if self.scripted is not None:
            return TimedEngineConfig(tokens_per_second=self.scripted.tokens_per_second)
        return (self.timed or TimedEngineConfig()) if self.kind == "timed" else None


class ServingConfig(Section):
    """How requests reach engines."""

    max_lag: int = Field(2, ge=1, description="An engine more than this many policy versions behind is unrouted.")
    request_timeout: float = Field(1800.0, gt=0, description="Seconds one model request may take, holds included.")
    kv_handoff: bool = Field(
        False,
        description="An engine that leaves rollout hands its KV blocks to the engines that go on; false: they compute "
        "them again.",
    )
    kv_transport: Literal["auto", "shared", "socket"] = Field(
        "auto",
        description="How KV blocks get from engine to engine; auto: shared memory on one host, a socket between hosts.",
    )
    kv_limit_mib: int = Field(4096, ge=1, description="Most host memory that one engine's handed-off KV takes, in MiB.")
    kv_timeout: float = Field(30.0, gt=0, description="Seconds after which KV blocks that nobody took are dropped.")


class ElasticConfig(Section):
    """What the elastic policy does beyond thresholds; docs/scheduling.md has the gain of each."""

    gain: bool = Field(
        True,
        description="A cell moves for the work it will do, as measured; false: for supply_fraction and hold.",
    )
    at_once: bool = Field(True, description="Several cells may be on their way into training; false: one at a time.")
    stay: bool = Field(True, description="Cells stay in training for the next batch where they have work.")
    give_back: bool = Field(True, description="Cells with nothing to train on go back to executions that wait.")
    longest_first: bool = Field(
        True, description="Grant the groups first whose task took longest before, as far as tasks come again."
    )
    adapt_lookahead: bool = Field(
        False, description="Use less lookahead than configured as long as cells do not idle for want of executions."
    )


class SchedulerConfig(Section):
    """When cells change role, and how much is dispatched."""

    policy: Literal["elastic", "colocate", "async", "async-stream"] = Field(
        "elastic",
        description="elastic: cells move; colocate: all roll out, then all train; async: rollout_cells only roll out "
        "and the others only train, a whole batch at a time; async-stream: the same, from its first ready group on.",
    )
    rollout_cells: int | None = Field(None, ge=0, description="Cells that only roll out, for the async policies.")
    elastic: ElasticConfig = Field(default_factory=ElasticConfig)
    batch_groups: int = Field(ge=1, description="Groups in a training batch.")
    group_size: int = Field(ge=2, description="Executions of one task, scored against each other.")
    lookahead: float = Field(0.25, ge=0, le=16, description="Executions outstanding beyond the batch, in batches.")
    supply_fraction: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Untaken ready groups, as a fraction of a batch, before a cell moves to training; what a move "
        "gains decides instead as soon as it is measured (elastic.gain).",
    )
    supply_hold: float = Field(10.0, ge=0, description="Seconds that this supply must have held.")
    top_ups: int = Field(3, ge=0, description="Top-up quotas that a starved batch may get before it closes short.")


class CheckpointConfig(Section):
    """What is kept for a resume. Every published policy is committed first (invariant 15), so there is no interval."""

    keep: int = Field(2, ge=1, description="Latest commits kept.")


class PlacementConfig(Section):
    """Slurm resources of one het group."""

    partition: str | None = Field(None, description="Partition; the cluster's default when null.")
    gres: str | None = Field(None, description='Generic resources of one node, for example "gpu:1".')
    cpus_per_task: int | None = Field(None, ge=1, description="CPU cores of one rank.")
    mem: str | None = Field(None, description='Memory of one node, for example "200G".')
    constraint: str | None = Field(None, description="Node features.")


class SlurmConfig(Section):
    """What Slurm is asked for, and how ranks start there."""

    time: str = Field("24:00:00", description="Time limit.")
    account: str | None = Field(None, description="Account to charge.")
    qos: str | None = Field(None, description="Quality of service.")
    het: bool = Field(True, description="One het job; false: the same ranks in one homogeneous allocation.")
    cells: PlacementConfig = Field(default_factory=PlacementConfig)
    hosts: PlacementConfig = Field(default_factory=PlacementConfig)
    setup: list[str] = Field(default_factory=list, description="Shell lines before srun: modules, conda, venv.")
    container: str | None = Field(None, description="Image for srun --container-image (pyxis/enroot).")
    signal_seconds: int = Field(
        120, ge=10, description="Seconds before the time limit at which the job requeues itself."
    )


class NetworkConfig(Section):
    """Ports, interface and node-local scratch of a run."""

    port_base: int = Field(
        0,
        ge=0,
        le=60000,
        description="First port of what is served between nodes, 16 a rank; 0 lets the system choose free ones.",
    )
    interface: str | None = Field(None, description="Network interface between ranks; null finds one by its routes.")
    weights: Literal["auto", "socket", "nixl"] = Field(
        "auto", description="How weights go between hosts; auto takes NIXL where it and a device for RDMA are there."
    )
    scratch: str | None = Field(None, description="Node-local directory; null takes $SLURM_TMPDIR, $TMPDIR or /tmp.")
    start_timeout: float = Field(900.0, gt=0, description="Seconds in which every rank must have reported.")
    alive_timeout: float = Field(30.0, gt=0, description="Seconds of silence after which a rank counts as lost.")


class Config(Section):
    """A run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Runs land in logs/<name>-<time>.")
    seed: int = Field(0, ge=0, description="Seed of everything that is random.")
    model: ModelConfig
    tasks: TasksConfig
    harness: HarnessConfig
    cells: CellsConfig
    hosts: HostsConfig = Field(default_factory=HostsConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    serving: ServingConfig = Field(default_factory=ServingConfig)
    scheduler: SchedulerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    root: str = Field("", description="Directory that relative paths start from: where Gyre was started.")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        scheduler, train = self.scheduler, self.train
        self._check_split()
        if train.updates % train.updates_per_batch:
            raise ValueError(
                f"train.updates ({train.updates}) must be a multiple of train.updates_per_batch "
                f"({train.updates_per_batch})"
            )
        if scheduler.batch_groups % train.updates_per_batch:
            raise ValueError(
                f"scheduler.batch_groups ({scheduler.batch_groups}) must be a multiple of train.updates_per_batch "
                f"({train.updates_per_batch}): each group is trained in exactly one update"
            )
        if train.max_staleness < scheduler.lookahead:
            raise ValueError(
                f"train.max_staleness ({train.max_staleness}) must be at least scheduler.lookahead "
                f"({scheduler.lookahead:g}): with less, groups are dropped and topped up for ever"
            )
        self._check_kinds()
        self._check_workers()
        return self

    def _check_workers(self) -> None:
        """Every GPU of a cell has a worker."""
        train, gpus = self.train, self.cells.gpus
        if gpus and gpus % train.stages:
            raise ValueError(f"cells.gpus ({gpus}) must be a multiple of train.stages ({train.stages})")
        if gpus and train.stages * self.shards != gpus:
            raise ValueError(
                f"train.stages x train.shards ({train.stages} x {self.shards}) must be cells.gpus ({gpus}), a worker "
                f"to a GPU; set train.shards={gpus // train.stages}, or leave it away"
            )
        if train.kind == "timed" and self.workers > 1:
            raise ValueError("train.kind timed has one worker; remove train.stages and train.shards")

    def _check_kinds(self) -> None:
        """Refuse kinds that compute nothing where real ones would meet what they leave out."""
        kinds = {"engine.kind": self.engine.kind, "train.kind": self.train.kind}
        real = {name for name, kind in kinds.items() if kind in ("vllm", "deepspeed")}
        if self.serving.kv_handoff and "engine.kind" not in real:
            raise ValueError(
                f"engine.kind {self.engine.kind} has no KV cache to hand off; set serving.kv_handoff=false"
            )
        if "engine.kind" in real and "train.kind" not in real:
            raise ValueError(
                "train.kind timed learns nothing, so a real engine would serve what no loss has shaped; "
                "set engine.kind=timed too"
            )
        if kinds["engine.kind"] == "scripted" and "train.kind" in real:
            raise ValueError(
                "engine.kind scripted replays answers that no policy sampled, so nothing can be learned from them; "
                "set train.kind=timed"
            )
        if self.model.path == "gyre:timed" and real:
            raise ValueError(
                "model.path gyre:timed is a tokenizer and a few numbers, which only kinds that compute nothing take; "
                "set engine.kind=timed (or scripted) and train.kind=timed, or name a model"
            )
        if self.cells.gpus and len(real) < len(kinds):
            words = " and ".join(f"{name} {kind}" for name, kind in kinds.items() if name not in real)
            raise ValueError(f"{words} uses no GPU; set cells.gpus=0")

    def _check_split(self) -> None:
        scheduler, cells = self.scheduler, self.cells
        rollout = scheduler.rollout_cells
        # By value and not by what was given: a run's own resolved configuration gives everything.
        plain = ElasticConfig()
        for key, value in scheduler.elastic:
            if scheduler.policy != "elastic" and value != getattr(plain, key):
                raise ValueError(f"scheduler.elastic.{key} has no effect under policy {scheduler.policy}; remove it")
        if scheduler.policy not in ("async", "async-stream"):
            if rollout is not None:
                raise ValueError(f"scheduler.rollout_cells has no effect under policy {scheduler.policy}; remove it")
            return
        if rollout is None:
            raise ValueError(f"scheduler.rollout_cells is missing; policy {scheduler.policy} needs it")
        if rollout >= cells.count:
            raise ValueError(
                f"scheduler.rollout_cells ({rollout}) must be less than cells.count ({cells.count}): "
                "no cell is left to train"
            )
        if not rollout and not cells.standalone:
            raise ValueError("scheduler.rollout_cells is 0 and cells.standalone too: nobody is left to roll out")

    @property
    def answers(self) -> Path | None:
        """The file that a scripted engine replays; a relative path starts where Gyre was started."""
        scripted = self.engine.scripted
        return None if scripted is None else Path(self.root, Path(scripted.answers).expanduser())

    @property
    def shards(self) -> int:
        """ZeRO shards of each stage of a cell."""
        if self.train.kind == "timed":
            return self.train.shards or 1
        return self.train.shards or max(1, self.cells.gpus // self.train.stages)

    @property
    def workers(self) -> int:
        """Training processes of a cell: its stages times its shards."""
        return self.train.stages * self.shards

    @property
    def batches(self) -> int:
        """Training batches of the whole run."""
        return self.train.updates // self.train.updates_per_batch


def _known_keys(path: tuple[str, ...]) -> list[str]:
    """Keys allowed at a dotted path of the configuration; empty where anything goes."""
    model: Any = Config
    for part in path:
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return []
        model = field.annotation
        if get_origin(model) is not None:
            model = next((a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _explain(error: ValidationError, source: str) -> str:
    """One line for the fault of a validation error that most likely caused the others: a misspelt key, or the first."""
    faults = error.errors()
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    path = tuple(str(p) for p in fault["loc"])
    dotted = ".".join(path)
    if fault["type"] == "extra_forbidden":
        known = _known_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, 1, 0.6)
        where = f" in {'.'.join(path[:-1])}" if path[:-1] else ""
        hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
        return f"{source}: unknown key {path[-1]!r}{where}; {hint}"
    if fault["type"] == "model_type":
        keys = ", ".join(".".join((*path, key)) for key in _known_keys(path))
        return f"{source}: {dotted} is a section, not {fault['input']!r}; set a key of it: {keys}"
    if fault["type"] == "missing" and isinstance(fault["loc"][-1], int):
        return f"{source}: {'.'.join(path[:-1])} has too few values; add one"
    if fault["type"] == "missing":
        return f"{source}: {dotted} is missing; add it"
    message = fault["msg"].removeprefix("Value error, ")
    value = "" if isinstance(fault["input"], (dict, Config)) else f", not {fault['input']!r}"
    return f"{source}: {dotted + ': ' if dotted else ''}{message[:1].lower() + message[1:]}{value}"


def _override(data: dict[str, Any], assignment: str) -> None:
    """Apply one `a.b=value` (value in YAML) to nested dictionaries."""
    key, sign, text = assignment.partition("=")
    if not sign or not key:
        raise UserError(f"{assignment!r} is not an override; write key=value, for example train.updates=6")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"override {assignment!r}: the value is not YAML") from error
    *parents, last = key.split(".")
    node: Any = data
    for parent in parents:
        node = node.setdefault(parent, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise UserError(f"override {assignment!r}: {'.'.join(parents)} is not a section")
    node[last] = value


def build(data: Any, source: str = "configuration") -> Config:
    """Validate nested dictionaries into a `Config`.

    Raises:
        UserError: with one line that names the key and what to change.
    """
    if not isinstance(data, dict):
        raise UserError(f"{source}: the configuration must be a mapping of keys, not {type(data).__name__}")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UserError(_explain(error, source)) from error


def load(path: Path | str, overrides: list[str] | tuple[str, ...] = (), root: Path | str | None = None) -> Config:
    """Read a YAML file, apply `key=value` overrides and validate.

    Raises:
        UserError: the file is missing, is not YAML, or does not describe a run.
    """
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f" (line {line + 1})" if line is not None else ""
        raise UserError(f"{path} is not YAML{where}; correct it") from error
    if isinstance(data, dict):
        for assignment in overrides:
            _override(data, assignment)
        if not data.get("root"):
            data["root"] = str(Path(root or Path.cwd()).resolve())
    return build(data, str(path))


def dump(config: Config) -> str:
    """The resolved configuration as YAML, as it is saved in the run directory."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
