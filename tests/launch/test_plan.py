"""From a configuration to ranks and what Slurm is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config import build
from gyre.errors import UserError
from gyre.launch.plan import Layout, gpus_of, plan
from tests.launch.support import settings


def config(tmp_path, **sections):
    data = settings(tmp_path)
    for name, values in sections.items():
        data[name] = {**data[name], **values}
    return build(data)


def test_ranks_are_cells_then_standalone_engines_then_hosts():
    layout = Layout(cells=2, standalone=1, hosts=2)
    assert [layout.kind(rank) for rank in range(5)] == ["cell", "cell", "standalone", "host", "host"]
    assert str(layout) == "2 cells + 1 standalone engine + 2 hosts"
    with pytest.raises(ValueError, match="no rank 5"):
        layout.kind(5)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [(None, 0), ("gpu", 1), ("gpu:4", 4), ("gpu:a100:8", 8), ("nvme:2,gpu:2(S:0-1)", 2), ("gres/gpu:h200:4", 4)],
)
def test_reads_generic_resources(gres, gpus):
    assert gpus_of(gres) == gpus


def test_het_job_of_one_cell_per_node(tmp_path):
    made = plan(config(tmp_path, cells={"standalone": 1}, hosts={"count": 2}))
    cells, hosts = made.components
    assert (cells.nodes, cells.tasks, cells.tasks_per_node, cells.gres, cells.cpus_per_task) == (4, 4, 1, "gpu:1", 2)
    assert (hosts.nodes, hosts.tasks, hosts.gres, hosts.partition) == (2, 2, None, "cpu")


def test_several_cells_share_a_node(tmp_path):
    data = settings(tmp_path)
    data["cells"] = {"count": 5, "slots": 1, "gpus": 4}
    data["slurm"]["cells"]["gres"] = "gpu:h100:8"
    made = plan(build(data))
    assert (made.cells_per_node, made.components[0].nodes, made.components[0].tasks) == (2, 3, 5)
    assert made.components[0].tasks_per_node == 2


def test_gpus_are_asked_for_when_gres_is_not_given(tmp_path):
    data = settings(tmp_path)
    data["cells"]["gpus"] = 2
    data["slurm"]["cells"]["gres"] = None
    assert plan(build(data)).components[0].gres == "gpu:2"


def test_a_node_too_small_for_a_cell_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"gpu:1.*2 GPUs"):
        plan(config(tmp_path, cells={"gpus": 2}))


@given(
    cells=st.integers(1, 40),
    standalone=st.integers(0, 10),
    hosts=st.integers(1, 10),
    per_node=st.sampled_from([1, 2, 8]),
)
def test_without_het_jobs_no_node_gets_more_cells_than_it_holds(tmp_path_factory, cells, standalone, hosts, per_node):
    data = settings(tmp_path_factory.mktemp("plan"))
    data["cells"] = {"count": cells, "slots": 1, "gpus": 1, "standalone": standalone}
    data["hosts"] = {"count": hosts}
    data["slurm"]["cells"]["gres"] = f"gpu:{per_node}"
    data["slurm"]["het"] = False
    made = plan(build(data))
    (flat,) = made.components
    assert flat.tasks == cells + standalone + hosts
    # srun --distribution=cyclic deals ranks out in turn
    on_node = [[rank for rank in range(flat.tasks) if rank % flat.nodes == node] for node in range(flat.nodes)]
    for ranks in on_node:
        engines = [rank for rank in ranks if made.layout.kind(rank) != "host"]
        assert len(engines) <= per_node
        assert ranks[: len(engines)] == engines  # the first local ranks, which is how GPUs are shared out
        assert len(ranks) <= flat.tasks_per_node
