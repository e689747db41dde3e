"""What is noted of a request while it is read: how large it grows, and what of it the model is not told. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

#: Kinds that are named in the log; other names are a client's own words.
_KNOWN = (
    *("web_search", "web_fetch", "file_search", "tool_search", "search_result", "code_execution", "code_interpreter"),
    *("bash", "text_editor", "local_shell", "shell", "apply_patch", "computer", "memory", "mcp", "image_generation"),
    *("server_tool_use", "tool_reference", "document", "input_file", "input_audio", "container_upload", "compaction"),
)


def _anything(size: int) -> None:
    """Room for all there is."""


@dataclass
class Intake:
    """One request's; `grow` is told of the bytes that it has beyond its body, and raises where there is no room."""

    grow: Callable[[int], None] = _anything
    left_out: set[str] = field(default_factory=set)

    def charge(self, value: Any) -> None:
        """Take in a value that the body only points to, or has packed: as large as an engine is sent it."""
        self.grow(len(msgspec.json.encode(value)))

    def leave_out(self, kind: str) -> None:
        """Note that a tool, item or part of this kind is not for the model here."""
        self.left_out.add(next((known for known in _KNOWN if kind.startswith(known)), "another kind"))

    def note(self, kind: str, name: str = "") -> str:
        """The text that stands for a part that the model cannot be shown."""
        self.leave_out(kind)
        return f"[{kind[:80]}{': ' + name[:200] if name else ''}: not shown here]"
