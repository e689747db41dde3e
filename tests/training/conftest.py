"""What tests of training share."""

import pytest

from tests.training.nest import Nest


@pytest.fixture(scope="session")
def nest(tmp_path_factory):
    """A process whose forks are trainers, feeders and whatever a small world consists of."""
    log = tmp_path_factory.mktemp("nest") / "log"
    nest = Nest(log)
    yield nest
    nest.close()
