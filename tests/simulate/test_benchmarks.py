"""The benchmarks: each has a short form and writes its figures, and figures of an older scheduler are not hidden."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLACE = Path(__file__).resolve().parents[2] / "benchmarks"
BENCHMARKS = sorted(PLACE.glob("[a-z]*.py"))  # as `make bench` runs them


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_has_a_short_form(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "--quick" in done.stdout and "--json OUT" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_the_short_form_runs_and_writes_its_figures(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, path, "--quick", "--json", tmp_path / "figures.json"]
    subprocess.run(command, cwd=PLACE.parent, check=True, stdout=subprocess.DEVNULL)
    assert json.loads((tmp_path / "figures.json").read_text())


def test_figures_of_another_scheduler_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLACE)
    import policies

    trace, shape = policies.TRACES[0], (2, 1, 1)

    def measured(*names: str) -> tuple[int, int]:
        kept = policies.Kept(tmp_path / "kept.json")
        found = kept.measure(trace, shape, 0.0, 0, 1, list(names))
        assert all(found[name]["updates"] == 24 for name in names)
        return kept.used, kept.others

    assert measured("elastic") == (0, 0)
    assert measured("elastic", "plain") == (1, 0)
    assert measured("elastic", "plain") == (2, 0)
    figures = json.loads((tmp_path / "kept.json").read_text())
    (known,) = figures.values()
    del known["plain"]["code"]  # as files from before have it
    (tmp_path / "kept.json").write_text(json.dumps(figures))
    assert measured("elastic", "plain") == (2, 1)
    monkeypatch.setattr(policies, "code", lambda: "another")
    assert measured("elastic", "plain", "colocate") == (2, 2)
