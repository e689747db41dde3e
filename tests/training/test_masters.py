"""Where the core's fp32 weights come from."""

import subprocess
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from gyre import config, models
from tests.launch.support import settings, write

PROGRAM = """
import sys
from pathlib import Path
import torch
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from gyre import config
from gyre.training.core import CoreModel, begin_world
device = torch.device("cpu")
begin_world(device, None)
core = CoreModel(Path(sys.argv[1]), config.load(sys.argv[2], root="."), device)
masters = {n: safe_get_full_fp32_param(p).clone() for n, p in zip(core.names, core.parameters)}
save_file(masters, sys.argv[3])
save_file({n: t.contiguous() for n, t in core.named()}, sys.argv[4])
"""


def test_masters_have_all_digits_that_the_disk_has(tmp_path):
    data = settings(tmp_path)
    data["model"]["dtype"] = "bfloat16"
    path = write(tmp_path, data)
    assert config.load(path, root=tmp_path).model.dtype == "bfloat16"
    model = models.resolve("gyre:tiny")
    outputs = [tmp_path / "masters", tmp_path / "weights"]
    command = [sys.executable, "-c", PROGRAM, str(model), str(path), *map(str, outputs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    masters, weights = map(load_file, outputs)
    disk = load_file(model / "model.safetensors")
    assert AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).num_parameters() == sum(
        t.numel() for t in masters.values()
    )
    assert any((t != t.bfloat16().float()).any() for t in disk.values()), "the test needs weights that rounding changes"
    for name, master in masters.items():
        assert torch.equal(master, disk[name]), name
        assert torch.equal(weights[name], disk[name].bfloat16()), name
