"""What tests of training share."""

import pytest

from tests.training.nest import Nest
from tests.training.shards import Shards


@pytest.fixture(scope="session")
def nest(tmp_path_factory):
    """A process whose forks are trainers, feeders and whatever a small world consists of."""
    log = tmp_path_factory.mktemp("nest") / "log"
    nest = Nest(log)
    yield nest
    nest.close()


@pytest.fixture(scope="session")
def one(nest, tmp_path_factory):
    """A stage of one shard, in a process."""
    shards = Shards(nest, tmp_path_factory.mktemp("one"), 1)
    yield shards
    shards.close()


@pytest.fixture(scope="session")
def two(nest, tmp_path_factory):
    """The two shards of a stage, in two processes."""
    shards = Shards(nest, tmp_path_factory.mktemp("two"), 2)
    yield shards
    shards.close()
