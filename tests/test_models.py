"""Models are made once, whole, and the same everywhere; wrong paths are refused in one line."""

import json
import os
import subprocess
import sys

import pytest

from gyre import models
from gyre.errors import UserError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny model, made in a cache of this test's own."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYRE_CACHE", str(cache))
        told = []
        path = models.resolve("gyre:tiny", lambda what, done: told.append((what, done)))
        assert told[-1][1] == 1.0
        assert models.resolve("gyre:tiny", lambda *args: pytest.fail("made twice")) == path
    return path


def test_tiny_is_small_and_complete(tiny):
    from transformers import AutoModelForCausalLM

    assert sum(file.stat().st_size for file in tiny.iterdir()) < 1_000_000
    assert not [file for file in tiny.parent.iterdir() if file.name.endswith(".making")]
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert sum(p.numel() for p in model.parameters()) == 119_232
    assert model.config.vocab_size == 320 and model.config.tie_word_embeddings
    models.check(str(tiny))
    assert models.parameters(tiny) == {"layers": 2, "kv_heads": 2, "head_dim": 32}


def test_layers_are_known_once_a_model_is_there(tiny, tmp_path, monkeypatch):
    assert models.layers(str(tiny)) == 2
    monkeypatch.setenv("GYRE_CACHE", str(tiny.parent.parent))
    assert models.layers("gyre:tiny") == 2
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))
    assert models.layers("gyre:tiny") is None
    (tmp_path / "config.json").write_text("[]")
    assert models.layers(str(tmp_path)) is None


def test_tiny_is_the_same_everywhere(tiny, tmp_path):
    env = {**os.environ, "GYRE_CACHE": str(tmp_path)}
    made = [sys.executable, "-c", "import torch; torch.manual_seed(7); import gyre.models as m; m.resolve('gyre:tiny')"]
    two = [subprocess.Popen(made, env=env) for _ in range(2)]  # at the same time
    assert [process.wait() for process in two] == [0, 0]
    (again,) = [p for p in (tmp_path / "models").iterdir() if p.is_dir()]
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_tokenizer_returns_every_byte(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "".join(chr(c) for c in range(1, 1500)) + "  two  spaces\r\n\ttab é ü 漢字 🙂 don't"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)
    messages = [{"role": "user", "content": "say aa"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nsay aa<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat, add_special_tokens=False).input_ids[:3] == [257, ord("u"), ord("s")]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("gyre:tinny", "there is no gyre:tinny; Gyre can make gyre:smollm2"),
        ("no/such/model", "no/such/model is not a directory"),
        ("empty", "has no config.json"),
        ("half", "has no .safetensors"),
    ],
)
def test_wrong_paths(tmp_path, path, complaint):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match=complaint) as caught:
        models.resolve(path, root=tmp_path)
    assert "\n" not in str(caught.value)


def test_command_line(tiny, tmp_path):
    command = [sys.executable, "-m", "gyre.models"]
    done = subprocess.run([*command, str(tiny)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(tiny))
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_timed_is_a_byte_tokenizer_and_numbers(tiny, tmp_path, monkeypatch):
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))
    path = models.resolve("gyre:timed")
    assert load_file(path / "model.safetensors")["weights.weight"].shape == (1024,)
    own, other = (Tokenizer.from_file(str(place / "tokenizer.json")) for place in (path, tiny))
    for text in ("hé\n\x00 ~", "".join(map(chr, range(300))), "<|im_start|>user\nx<|im_end|>"):
        ids = own.encode(text).ids
        assert ids == other.encode(text).ids
        assert own.decode(ids, skip_special_tokens=False) == text
