"""docs/configuration.md, rendered from the types and descriptions in `gyre.config`.

`python -m gyre.config_doc > docs/configuration.md` renews the page; a test fails when it is out of date.
"""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gyre.config import Config

_INTRO = """# Configuration

*Generated from `gyre/config.py` by `python -m gyre.config_doc > docs/configuration.md`.*

A run is described by one YAML file. `key=value` on the command line overrides a key of it:

    ./launch.py run configs/quickstart.yaml train.updates=12 harness.score.timeout=30

Values are YAML. An unknown key, a missing one, or a value out of range ends with exit code 2 and one line that says
what to change, before anything starts. The resolved configuration is saved as `config.yaml` in the run directory, and
everything after the launch, a resume too, reads it from there.

Relative paths start from the directory in which Gyre was started; `{root}` in commands stands for it.

Checked together: `train.updates` and `scheduler.batch_groups` are multiples of `train.updates_per_batch`, since each
group is trained on in exactly one update; `train.max_staleness` is at least `scheduler.lookahead`, since with less,
groups would be dropped and topped up for ever.
"""


def _optional(annotation: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    if get_origin(annotation) in (Union, types.UnionType):
        kept = [a for a in get_args(annotation) if a is not type(None)]
        if len(kept) == 1:
            return kept[0], len(kept) < len(get_args(annotation))
    return annotation, False


def _section(annotation: Any) -> type[BaseModel] | None:
    bare, _ = _optional(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def type_words(annotation: Any) -> str:
    """A type in words: integer, list of text, `a` or `b`, ... or null."""
    bare, optional = _optional(annotation)
    plain = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}
    if bare in plain:
        words = plain[bare]
    elif get_origin(bare) is Literal:
        words = " or ".join(f"`{value}`" for value in get_args(bare))
    elif get_origin(bare) is list:
        words = f"list of {type_words(get_args(bare)[0])}"
    elif get_origin(bare) is Annotated:
        words = type_words(get_args(bare)[0])
    elif get_origin(bare) is tuple:
        words = f"{len(get_args(bare))} {type_words(get_args(bare)[0])}s"
    elif get_origin(bare) is dict:
        words = f"mapping to {type_words(get_args(bare)[1])}"
    else:
        words = str(bare)
    return words + (" or null" if optional else "")


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    parts = []
    for constraint in field.metadata:
        parts += [f"{word} {getattr(constraint, sign)}" for sign, word in signs.items() if hasattr(constraint, sign)]
    return ", " + ", ".join(parts) if parts else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.default if field.default is not PydanticUndefined else field.get_default(call_default_factory=True)
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _table(model: type[BaseModel]) -> list[str]:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if _section(field.annotation) is None:
            what = type_words(field.annotation) + _bounds(field)
            lines.append(f"| `{name}` | {_cell(what)} | {_cell(_default(field))} | {_cell(field.description or '')} |")
    return lines if len(lines) > 2 else []


def _sections(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            dotted = ".".join((*path, name))
            meaning = field.description or (section.__doc__ or "").strip()
            required = " Required." if field.is_required() else ""
            lines += [f"## `{dotted}`", "", f"{meaning}{required}", "", *_table(section)]
            lines += [""] if _table(section) else []
            lines += _sections(section, (*path, name))
    return lines


def render() -> str:
    """The whole page."""
    lines = [_INTRO, "## Top level", "", *_table(Config), "", *_sections(Config, ())]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(render(), end="")
