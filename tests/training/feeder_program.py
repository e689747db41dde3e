"""The feeder, with samples that are a function of the execution's number instead of ones read from records."""

import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.training.cells import make_sample

sampling = types.ModuleType("gyre.trajectories.sampling")
sampling.samples = lambda run_dir, n: [make_sample(n, n // 2)]
sys.modules["gyre.trajectories.sampling"] = sampling

from gyre.training import feeder  # noqa: E402

feeder.main()
