"""Learning rates against values by hand."""

import pytest

from gyre.config_train import ScheduleConfig
from gyre.training.schedule import lr_at


@pytest.mark.parametrize(
    ("schedule", "updates", "expected"),
    [
        ({}, 3, [8, 8, 8]),
        ({"warmup": 4}, 6, [2, 4, 6, 8, 8, 8]),
        ({"warmup": 1}, 2, [8, 8]),
        ({"kind": "linear"}, 4, [8, 6, 4, 2]),
        ({"kind": "linear", "floor": 0.5}, 4, [8, 7, 6, 5]),
        ({"kind": "linear", "warmup": 2, "floor": 0.25}, 4, [4, 8, 6, 4]),
        ({"kind": "cosine"}, 4, [8, 6.8284271247, 4, 1.1715728753]),
        ({"kind": "cosine", "warmup": 2, "floor": 0.5}, 5, [4, 8, 7.4142135624, 6, 4.5857864376]),
        ({"kind": "cosine"}, 1, [8]),
        ({"kind": "linear", "warmup": 1}, 2, [8, 4]),
    ],
)
def test_it_is_what_was_worked_out(schedule, updates, expected):
    own = ScheduleConfig(**schedule)
    assert [lr_at(own, 8.0, update, updates) for update in range(1, updates + 1)] == pytest.approx(expected)
    after = 8.0 * (own.floor if own.kind != "constant" else 1.0)
    assert lr_at(own, 8.0, updates + 1, updates) == lr_at(own, 8.0, updates + 7, updates) == pytest.approx(after)
    assert lr_at(own, 0.0, 1, updates) == 0


def test_there_is_no_update_before_the_first():
    with pytest.raises(ValueError, match="counted from 1"):
        lr_at(ScheduleConfig(), 1.0, 0, 3)
