"""A configuration is one YAML file and overrides, refused with one line or resolved for good."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from gyre.config import Config, build, dump, load
from gyre.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
MINIMAL = {
    "model": {"path": "gyre:tiny"},
    "tasks": {"path": "tasks.jsonl"},
    "harness": {"command": ["agent"], "score": {"command": ["score"]}},
    "cells": {"count": 1, "slots": 1},
    "scheduler": {"batch_groups": 4, "group_size": 2},
    "train": {"updates": 4},
}


def changed(**sections):
    data = {name: dict(section) for name, section in MINIMAL.items()}
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values} if isinstance(values, dict) else values
    return data


def test_minimal_configuration_gets_defaults():
    config = build(MINIMAL)
    assert config.scheduler.lookahead == 0.25
    assert config.batches == 4
    assert config.cells.gpus == 1


def test_what_is_saved_loads_to_the_same(tmp_path):
    config = build(changed(root=str(tmp_path), train={"updates": 6, "updates_per_batch": 2, "lr": 3.0e-5}))
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml") == config


def test_overrides_win_and_are_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    config = load(path, ["train.updates=8", "harness.command=[a, b]", "network.interface=ib0", "seed=3"], root=tmp_path)
    assert (config.train.updates, config.harness.command) == (8, ["a", "b"])
    assert (config.network.interface, config.seed, config.root) == ("ib0", 3, str(tmp_path))


def test_relative_paths_start_where_gyre_was_started(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MINIMAL))
    monkeypatch.chdir(tmp_path)
    assert load("config.yaml").root == str(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed(scheduler={"group_sise": 2}), "unknown key 'group_sise' in scheduler; did you mean group_size?"),
        (changed(modle={}), "did you mean model?"),
        (changed(train={"zzz": 1}), "known keys are kind, updates"),
        (changed(train={"updates": 0}), "train.updates"),
        (changed(train={"updates": 3, "updates_per_batch": 2}), "train.updates (3) must be a multiple"),
        (changed(train={"updates": 9, "updates_per_batch": 3}), "scheduler.batch_groups (4) must be a multiple"),
        (changed(scheduler={"lookahead": 4}, train={"max_staleness": 2}), "at least scheduler.lookahead"),
        (changed(harness={"score": {"command": ["a"], "function": "m:f"}}), "exactly one of command and function"),
        (changed(name="a b"), "name"),
        (changed(model={"dtype": "float16"}), "'float16'"),
        (changed(engine={"timed": {"slowdown": 1}}), "engine: timed has no effect with kind vllm"),
        (changed(engine={"kind": "timed", "args": {"max-num-seqs": 4}}), "args are flags of vLLM"),
        (changed(engine={"kind": "timed", "timed": {"slowdwn": 1}}), "in engine.timed; did you mean slowdown?"),
        (changed(engine={"kind": "timed", "timed": {"tokens_per_second": 0}}), "engine.timed.tokens_per_second"),
        (changed(engine={"kind": "timed"}), "engine.kind timed uses no GPU; set cells.gpus=0"),
        (changed(train={"timed": {"seconds_per_row": 1}}), "train: timed has no effect with kind deepspeed"),
        (changed(train={"kind": "timed"}), "set engine.kind=timed too"),
        (changed(model={"path": "gyre:timed"}), "only kinds that compute nothing take"),
        (changed(engine={"kind": "scripted"}), "engine: scripted.answers is missing; kind scripted replays"),
        (changed(engine={"scripted": {"answers": "a.jsonl"}}), "engine: scripted has no effect with kind vllm"),
        (changed(engine={"kind": "scripted", "scripted": {}}), "engine.scripted.answers is missing; add it"),
        (
            changed(engine={"kind": "scripted", "scripted": {"answers": "a.jsonl"}}),
            "no policy sampled, so nothing can be learned from them; set train.kind=timed",
        ),
        ([1], "must be a mapping"),
        ({}, "is missing; add it"),
    ],
)
def test_refused_in_one_line(data, words):
    with pytest.raises(UserError) as refused:
        build(data, "here.yaml")
    assert words in str(refused.value)
    assert str(refused.value).startswith("here.yaml: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"objective": "ppo"}, ["train.objective", "'grpo'", "'reinforce++'", "not 'ppo'"]),
        ({"averaging": "tokens"}, ["train.averaging", "'execution' or 'token'", "not 'tokens'"]),
        ({"advantages": "one"}, ["train.advantages", "not 'one'"]),
        ({"clip_ratio": 0}, ["train.clip_ratio", "greater than 0"]),
        ({"clip_ratio": 1}, ["train.clip_ratio", "less than 1"]),
        ({"clip_ratio_high": 0}, ["train.clip_ratio_high", "greater than 0"]),
        ({"truncation": 0.5}, ["train.truncation", "greater than or equal to 1"]),
        ({"kl": -0.1}, ["train.kl", "greater than or equal to 0"]),
        ({"objective": "rloo", "clip_ratio": 0.2}, ["train: objective rloo clips nothing"]),
        (
            {"objective": "cispo", "truncation": None},
            ["objective cispo bounds importance weights", "set trunc"],
        ),
        ({"objective": "reinforce++", "kl": 0.1}, ["train: objective reinforce++ divides", "set train.kl=0"]),
        ({"lr": -1e-6}, ["train.lr", "greater than or equal to 0"]),
        ({"schedule": {"kind": "cosinus"}}, ["train.schedule.kind", "'cosine'", "not 'cosinus'"]),
        ({"schedule": {"warmup": -1}}, ["train.schedule.warmup", "not -1"]),
        ({"schedule": {"warm_up": 3}}, ["'warm_up' in train.schedule", "did you mean warmup?"]),
        ({"schedule": {"warmup": 4}}, ["schedule.warmup (4) must be less than updates (4)"]),
        ({"schedule": {"kind": "linear", "floor": 1.5}}, ["train.schedule.floor", "less than or equal to 1"]),
        ({"schedule": {"floor": 0.1}}, ["floor has no effect with kind constant; set train.schedule.kind=linear"]),
        (
            {"schedule": "cosine"},
            ["train.schedule is a section, not 'cosine'", "a key of it: train.schedule.kind, "],
        ),
        ({"betas": [0.9, 1.0]}, ["train.betas.1", "less than 1", "not 1.0"]),
        ({"betas": [0.9]}, ["train.betas has too few values"]),
        ({"lr": float("inf")}, ["train.lr", "finite"]),
        ({"clip_norm": float("nan")}, ["train.clip_norm", "not nan"]),
        ({"zero_stage": 1}, ["train.zero_stage", "2 or 3", "not 1"]),
        ({"offload_optimizer": "cpu"}, ["train.offload_optimizer", "valid boolean", "not 'cpu'"]),
        ({"stages": 0}, ["train.stages", "greater than or equal to 1"]),
        ({"shards": 0}, ["train.shards", "greater than or equal to 1"]),
        ({"micro_tokens": 16}, ["train.micro_tokens", "greater than or equal to 32"]),
        ({"sample_limit": 16}, ["train.sample_limit", "greater than or equal to 32"]),
        ({"stage": 2}, ["unknown key 'stage' in train; did you mean stages?"]),
        ({"shard": 2}, ["unknown key 'shard' in train; did you mean shards?"]),
    ],
)
def test_what_training_refuses(train, words):
    with pytest.raises(UserError) as refused:
        build(changed(train=train), "here.yaml")
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert str(refused.value).startswith("here.yaml: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "train", "words"),
    [
        (3, {"stages": 2}, "cells.gpus (3) must be a multiple of train.stages (2)"),
        (1, {"stages": 2}, "cells.gpus (1) must be a multiple of train.stages (2)"),
        (8, {"stages": 2, "shards": 2}, "train.stages x train.shards (2 x 2) must be cells.gpus (8)"),
        (8, {"stages": 2, "shards": 2}, "set train.shards=4, or leave it away"),
        (2, {"shards": 4}, "set train.shards=2"),
        (0, {"kind": "timed", "stages": 2}, "train.kind timed has one worker; remove train.stages and train.shards"),
        (0, {"kind": "timed", "shards": 2}, "train.kind timed has one worker"),
    ],
)
def test_workers_that_do_not_fit_a_cell(gpus, train, words):
    engine = {"kind": "timed"} if train.get("kind") == "timed" else {}
    with pytest.raises(UserError) as refused:
        build(changed(cells={"count": 1, "slots": 1, "gpus": gpus}, train=train, engine=engine))
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "train", "shards", "workers"),
    [
        (0, {}, 1, 1),
        (1, {}, 1, 1),
        (0, {"stages": 2}, 1, 2),
        (0, {"stages": 2, "shards": 2}, 2, 4),
        (8, {}, 8, 8),
        (8, {"stages": 2}, 4, 8),
        (8, {"stages": 2, "shards": 4}, 4, 8),
        (8, {"zero_stage": 3}, 8, 8),
        (8, {"stages": 2, "zero_stage": 3}, 4, 8),
        (0, {"shards": 2, "zero_stage": 3, "offload_optimizer": True}, 2, 2),
    ],
)
def test_every_gpu_of_a_cell_has_a_worker(gpus, train, shards, workers, tmp_path):
    config = build(changed(cells={"count": 1, "slots": 1, "gpus": gpus}, train=train))
    assert (config.shards, config.workers) == (shards, workers)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml").workers == workers


def test_the_example_for_a_cluster_takes_cells_of_eight_gpus():
    """As its comments say; what is left away follows from the number of GPUs."""
    for words, workers, shards in (
        ([], 1, 1),
        (["cells.gpus=8"], 8, 8),
        (["cells.gpus=8", "train.stages=2"], 8, 4),
        (["cells.gpus=8", "train.zero_stage=3"], 8, 8),
    ):
        config = load(ROOT / "configs/qwen3-8b.yaml", words)
        assert (config.workers, config.shards) == (workers, shards)


@pytest.mark.parametrize(
    "train",
    [
        {"objective": "dapo", "averaging": "execution", "clip_ratio": 0.2, "clip_ratio_high": 0.28, "truncation": None},
        {"objective": "reinforce++", "averaging": "token", "kl": 0, "truncation": 1},
        {"objective": "rloo", "kl": 0.001, "truncation": None},
        {"objective": "cispo", "clip_ratio_high": 4, "truncation": None},
        {"lr": 0, "schedule": {"kind": "cosine", "warmup": 3, "floor": 0.1}},
        {"micro_tokens": 32, "sample_limit": 32, "advantages": "ones"},
    ],
)
def test_what_training_takes_is_saved_as_it_is(train, tmp_path):
    config = build(changed(root=str(tmp_path), train=train))
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml") == config
    kept = config.model_dump(mode="json")["train"]
    assert all(kept[key] == value for key, value in train.items())


def test_a_misspelt_key_is_named_rather_than_the_one_it_leaves_missing():
    data = changed()
    data["scheduler"] = {"batch_groups": 4, "group_sise": 2}
    with pytest.raises(UserError, match="did you mean group_size"):
        build(data)


def fields(model, prefix=""):
    """Every field of the configuration with its dotted name."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")


def test_every_value_is_documented():
    silent = [
        name
        for name, field in fields(Config)
        if not field.description
        and not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    ]
    assert silent == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*Config.model_fields, "x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_whatever_the_file_holds_the_answer_is_one_line(data):
    with pytest.raises(UserError) as refused:
        build(data)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("policy", ["colocate", "async", "async-stream"])
def test_a_run_of_any_policy_reads_its_own_configuration(policy, tmp_path):
    scheduler = {"batch_groups": 2, "group_size": 2, "policy": policy}
    if policy != "colocate":
        scheduler["rollout_cells"] = 1
    config = build({**MINIMAL, "cells": {"count": 2, "slots": 2}, "scheduler": scheduler})
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml").scheduler == config.scheduler
    with pytest.raises(UserError, match="scheduler.elastic.stay has no effect under policy"):
        build({**MINIMAL, "cells": {"count": 2, "slots": 2}, "scheduler": {**scheduler, "elastic": {"stay": False}}})


@pytest.mark.parametrize(
    "scheduler, words",
    [
        ({"policy": "async"}, "rollout_cells is missing"),
        ({"policy": "async", "rollout_cells": 2}, "no cell is left to train"),
        ({"policy": "async-stream", "rollout_cells": 0}, "nobody is left to roll out"),
        ({"rollout_cells": 1}, "has no effect under policy elastic"),
    ],
)
def test_a_split_that_cannot_be(scheduler, words):
    sizes = {"batch_groups": 2, "group_size": 2, **scheduler}
    with pytest.raises(UserError, match=words):
        build({**MINIMAL, "cells": {"count": 2, "slots": 2}, "scheduler": sizes})
