"""launch.py selftest with a real engine and a real trainer: they agree, and an engine that is off is found."""

import json

import pytest

from gyre.selftest import LIMITS
from tests.whole.support import tiny

pytestmark = pytest.mark.whole


def selftest(place, tmp_path, code, **sections):
    """Run a self-test that must end with a code; returns its figures and what it printed."""
    config = tiny(tmp_path, cells={"count": 1, "slots": 16}, **sections)
    out = tmp_path / "figures.json"
    assert place.launch("selftest", config, "scheduler.batch_groups=2", "--json", out) == code, place.output()
    figures = json.loads(out.read_text())
    run = next((place.path / "logs").iterdir())
    assert figures["run"] == str(run) and run.name.startswith("whole-selftest-")
    assert not (run / "checkpoints").exists()
    assert figures["checksum_before"] == figures["checksum_after"], "learning rate 0 must leave the weights alone"
    sampled = json.loads((run / "summary.json").read_text())["tokens"]
    assert figures["tokens"] == sampled > 0, "not every sampled token was compared"
    return figures, place.output()


def test_engine_and_trainer_agree(place, tmp_path):
    figures, printed = selftest(place, tmp_path, 0)
    assert "self-test passed" in printed and "look at" not in printed
    assert figures["passed"] and 0 < figures["mismatch_max"] < 5e-5
    assert 0.9999 < figures["ratio_min"] <= figures["ratio_max"] < 1.0001


@pytest.mark.full
def test_an_engine_with_another_norm_is_found(place, tmp_path):
    figures, printed = selftest(place, tmp_path, 1, engine={"args": {"hf-overrides": {"rms_norm_eps": 0.01}}})
    assert "self-test failed" in printed and "look at: architecture" in " ".join(printed.split())
    assert figures["mismatch_mean"] > 100 * LIMITS["float32"].mean


@pytest.mark.full
def test_bfloat16_on_both_sides_is_within_its_own_limits(place, tmp_path):
    figures, _ = selftest(place, tmp_path, 0, model={"dtype": "bfloat16"})
    assert figures["mismatch_mean"] > 10 * LIMITS["float32"].mean, "it would not be found in float32"


@pytest.mark.full
def test_stages_and_shards_agree_with_the_engine_too(place, tmp_path):
    train = {"stages": 2, "shards": 2, "micro_tokens": 128}
    figures, _ = selftest(place, tmp_path, 0, train={"updates": 1, **train})
    assert 0 < figures["mismatch_max"] < 5e-5
