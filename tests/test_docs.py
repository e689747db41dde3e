"""The documents say what the code says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gyre import config_doc
from gyre.cell import machine
from gyre.status import decode
from tests.fake_run import START, Script, make_config, make_status, write_run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_configuration_page_is_current() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == config_doc.render(), "renew it: python -m gyre.config_doc > docs/configuration.md"


def test_picture_is_current() -> None:
    subprocess.run([sys.executable, "docs/make_pictures.py", "--check"], cwd=ROOT, env={"PYTHONPATH": "."}, check=True)


def test_recording_a_moment_for_the_picture(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs/make_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    pictures.SAMPLE = tmp_path / "sample"
    script = Script()
    script.start()
    script.batch(1)
    status = make_status(script.t)
    status.ranks[1].state = "TRAINING"
    run = write_run(tmp_path / "r", make_config(root=str(tmp_path)), script.events, status)
    pictures.record(run.path, update=3)
    kept = "".join(p.read_text() for p in pictures.SAMPLE.iterdir())
    assert str(tmp_path) not in kept and "execution_closed" not in kept and "update_done" in kept
    assert decode((pictures.SAMPLE / "status.json").read_text()).scheduler.update == 3
    assert START < status.time


def test_state_diagram_is_the_table_of_the_machine() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert f"```mermaid\n{machine.mermaid()}```" in page, "put gyre.cell.machine.mermaid() into docs/architecture.md"


def test_every_invariant_has_a_row() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert [int(n) for n in rows] == list(range(1, 16))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    named = re.findall(r"`((?:gyre|tests|slurm|configs|examples|docs)/[\w./-]*[\w/])`", text)
    for name in named:
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_headings_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        text = ((page.parent / target) if target else page).read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
        assert anchor in slugs, f"{page.name} links to #{anchor} of {target or page.name}"
