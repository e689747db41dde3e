"""A place to start whole runs from, in which nothing may be left."""

import pytest

from tests.whole.support import Place


def leaving_nothing(path):
    """A `Place`; the test fails where something is left behind."""
    here = Place(path)
    yield here
    left = here.leftovers()
    here.kill_everything()
    assert not left


@pytest.fixture
def place(tmp_path, fork_server):
    """A place whose engines are forked from the tests' fork server."""
    yield from leaving_nothing(tmp_path / "p")


@pytest.fixture
def light_place(tmp_path):
    """A place for stand-in engines, which need no fork server."""
    yield from leaving_nothing(tmp_path / "p")
