"""A place to start whole runs from, in which nothing may be left."""

import pytest

from tests.whole.support import Place


@pytest.fixture
def place(tmp_path, fork_server):
    """A `Place`; the test fails where something is left behind."""
    here = Place(tmp_path / "p")
    yield here
    left = here.leftovers()
    here.kill_everything()
    assert not left
