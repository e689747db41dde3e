"""The section of the configuration that training reads. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gyre.config_section import Section

_Decay = Annotated[float, Field(ge=0, lt=1)]


class TimedTrainConfig(Section):
    """How long a timed trainer takes for a micro-step: the sum of these. It computes nothing."""

    seconds_per_micro_step: float = Field(0.0, ge=0, le=600, description="Seconds for each micro-step.")
    seconds_per_row: float = Field(
        0.0, ge=0, le=600, description="Seconds for each sample in it; an execution with one conversation is one."
    )
    seconds_per_token: float = Field(0.0, ge=0, le=1, description="Seconds for each token in it.")


class ScheduleConfig(Section):
    """The learning rate over the updates of a run."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How it falls after warm-up, over the rest of the run."
    )
    warmup: int = Field(0, ge=0, description="Updates in which it rises in a line from nothing to train.lr.")
    floor: float = Field(0.0, ge=0, le=1, description="Fraction of train.lr that it falls to.")

    @model_validator(mode="after")
    def _falls(self) -> ScheduleConfig:
        if self.floor and self.kind == "constant":
            raise ValueError("floor has no effect with kind constant; set train.schedule.kind=linear or cosine")
        return self


class TrainConfig(Section):
    """The training of a batch."""

    kind: Literal["deepspeed", "timed"] = Field(
        "deepspeed", description="The trainer; timed: it waits for a configured time and moves the weights a little."
    )
    updates: int = Field(ge=1, description="Optimizer steps of the whole run.")
    updates_per_batch: int = Field(1, ge=1, description="Optimizer steps that a batch's groups are split over.")
    objective: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++"] = Field(
        "grpo", description="The loss, with its paper's advantages, averaging and clipping (docs/objectives.md)."
    )
    averaging: Literal["execution", "token"] | None = Field(
        None,
        description="execution: the mean over an execution's tokens, then over executions; token: over all tokens. "
        "Null is the objective's own (docs/objectives.md).",
    )
    advantages: Literal["group", "shuffled", "ones"] = Field(
        "group",
        description="group: relative to the group; shuffled: the control that must not learn; ones: 1 for every "
        "execution, so that every token is compared (launch.py selftest).",
    )
    lr: float = Field(1.0e-6, ge=0, description="Learning rate of AdamW, at the top of the schedule.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="AdamW's moment decays, at least 0 and below 1.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    clip_norm: float = Field(1.0, gt=0, description="Global gradient norm above which gradients are scaled down.")
    clip_ratio: float | None = Field(
        None, gt=0, lt=1, description="The importance ratio is clipped below at 1 - this; null is the objective's own."
    )
    clip_ratio_high: float | None = Field(
        None, gt=0, description="And above at 1 + this; null is the objective's own, or clip_ratio where that is given."
    )
    truncation: float | None = Field(
        2.0,
        ge=1,
        description="A token's importance weight, trainer against sampler, counts as this at most where the objective "
        "does not clip it; null: as it is.",
    )
    kl: float = Field(
        0.0, ge=0, description="Weight of the KL divergence from the initial model; above 0 each cell holds it too."
    )
    zero_stage: Literal[2, 3] = Field(2, description="DeepSpeed ZeRO stage of the core.")
    offload_optimizer: bool = Field(False, description="Keep the core's optimizer state in CPU memory.")
    stages: int = Field(1, ge=1, description="Pipeline stages of a cell; each holds a part of the layers.")
    shards: int | None = Field(
        None, ge=1, description="ZeRO shards of each stage; null: as many as the cell has GPUs for, 1 on the CPU."
    )
    micro_tokens: int = Field(8192, ge=32, description="Token budget of a micro-step; a longer sample comes alone.")
    checkpoint_activations: bool = Field(
        False, description="Keep each layer's input alone and compute the rest again for gradients: long micro-steps."
    )
    sample_limit: int | None = Field(
        None, ge=32, description="A sample of more tokens is refused, and said to be; null: model.max_context."
    )
    max_staleness: int = Field(2, ge=0, description="A group sampled more policy versions ago than this is dropped.")
    threads: int = Field(1, ge=1, description="CPU threads of a trainer.")
    timed: TimedTrainConfig | None = Field(None, description="With kind timed: how long a micro-step takes.")

    @model_validator(mode="after")
    def _of_a_kind(self) -> TrainConfig:
        if self.timed is not None and self.kind != "timed":
            raise ValueError("timed has no effect with kind deepspeed; set train.kind=timed, or remove train.timed")
        if self.schedule.warmup >= self.updates:
            raise ValueError(
                f"schedule.warmup ({self.schedule.warmup}) must be less than updates ({self.updates}): the learning "
                "rate would never reach train.lr"
            )
        return self

    @model_validator(mode="after")
    def _of_an_objective(self) -> TrainConfig:
        clips = self.clip_ratio is not None or self.clip_ratio_high is not None
        if self.objective == "rloo" and clips:
            raise ValueError("objective rloo clips nothing; remove clip_ratio and clip_ratio_high, or set truncation")
        if self.objective == "cispo" and not clips and self.truncation is None:
            raise ValueError(
                "objective cispo bounds importance weights and has no bound; set truncation or clip_ratio_high"
            )
        if self.objective == "reinforce++" and self.kl:
            raise ValueError(
                "objective reinforce++ divides the whole gradient by the advantages' standard deviation, known only "
                "when an update ends, and kl would be divided too; set train.kl=0, or another objective"
            )
        return self

    @property
    def times(self) -> TimedTrainConfig:
        """How long a timed trainer takes, its defaults where nothing is configured."""
        return self.timed or TimedTrainConfig()
