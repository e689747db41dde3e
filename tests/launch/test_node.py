"""What a rank knows about its node."""

import dataclasses
import socket
import stat

import pytest

from gyre.config import build
from gyre.errors import UserError
from gyre.launch import check, node
from gyre.launch.identity import Identity
from tests.launch.support import settings

LOCAL = Identity(1, 4, 1, "local-1", "local", "1")
SLURM = Identity(1, 4, 0, "slurm-1-0-0", "slurm", "1", node="n1", nodes=("n1", "n2"), launch_address="127.0.0.1")


def config(tmp_path, **sections):
    data = settings(tmp_path)
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return build(data)


def test_ports_are_the_systems_choice_unless_a_base_is_set(tmp_path):
    assert node.port(config(tmp_path), "store") == 0
    based = config(tmp_path, network={"port_base": 20000})
    ports = [node.port(based, purpose, rank) for rank in range(4) for purpose in ("store", "engine", "proxy", "feeder")]
    assert len(set(ports)) == 16
    assert min(ports) == 20000
    assert max(ports) < 20000 + 4 * node.PORTS_PER_RANK
    with pytest.raises(KeyError):
        node.port(based, "nothing")


def test_ports_beyond_the_last_are_refused(tmp_path):
    check.ports(config(tmp_path, network={"port_base": 60000}))
    with pytest.raises(UserError, match="privileged"):
        check.ports(config(tmp_path, network={"port_base": 80}))


def test_a_local_run_stays_on_loopback(tmp_path):
    assert node.address(config(tmp_path), LOCAL) == "127.0.0.1"


def test_several_nodes_on_one_machine_stay_on_loopback(tmp_path):
    assert node.address(config(tmp_path), SLURM) == "127.0.0.1"
    assert node.address(config(tmp_path), dataclasses.replace(SLURM, nodes=("n1",))) == "127.0.0.1"


def test_the_address_is_where_the_route_to_the_others_starts(tmp_path, monkeypatch):
    routes = {"10.0.0.7": "10.0.0.3", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(node, "_route_to", routes.get)
    monkeypatch.setattr(node, "_resolve", {"n2": "10.0.0.7"}.get)
    assert node.address(config(tmp_path), SLURM) == "10.0.0.3"


def test_an_interface_decides(tmp_path):
    assert node.address(config(tmp_path, network={"interface": "lo"}), SLURM) == "127.0.0.1"
    with pytest.raises(UserError, match=r"network\.interface.*ib7.*it has .*lo"):
        node.address(config(tmp_path, network={"interface": "ib7"}), SLURM)


def test_scratch_is_private_fresh_and_short(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    here = config(tmp_path)
    paths = {node.scratch(here, "run", 1, rank) for rank in (0, 1)} | {node.scratch(here, "other", 1, 0)}
    assert len(paths) == 3
    for path in paths:
        assert path.parent == tmp_path / "tmp"
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert len(path.name) < 40  # a Unix socket in it has to fit into 107 bytes
    first = node.scratch(here, "run", 1, 0)
    (first / "left").touch()
    assert not (node.scratch(here, "run", 1, 0) / "left").exists()
    second = node.scratch(here, "run", 2, 0)
    assert second != first and not first.exists(), "what a killed attempt left on this node goes with the next one"


def test_scratch_with_something_that_cannot_be_removed_is_used_again(tmp_path, monkeypatch):
    here = config(tmp_path, network={"scratch": str(tmp_path / "tmp")})
    first = node.scratch(here, "run", 1, 0)
    (first / "left").touch()
    first.chmod(0o755)
    monkeypatch.setattr(node.shutil, "rmtree", lambda path, ignore_errors: None)
    assert node.scratch(here, "run", 1, 0) == first
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    (first / "left").unlink()
    first.rmdir()
    first.symlink_to(tmp_path)
    with pytest.raises(UserError, match="a link is there"):
        node.scratch(here, "run", 1, 0)


def test_scratch_that_cannot_be_made_names_its_key(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"network\.scratch"):
        node.scratch(config(tmp_path, network={"scratch": str(tmp_path / "file")}), "run", 1, 0)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "engine", "visible", "expected"),
    [
        (0, 0, True, "0,1", ""),
        (1, 0, False, "0,1", ""),
        (1, 1, True, "0,1", "1"),
        (2, 1, True, "4,5,6,7", "6,7"),
        (2, 1, True, "6,7", "6,7"),  # Slurm narrowed it already
        (1, 0, True, "GPU-ab,GPU-cd", "GPU-ab"),
    ],
)
def test_gpus_of_a_rank(tmp_path, gpus, local_rank, engine, visible, expected):
    who = dataclasses.replace(SLURM, local_rank=local_rank)
    data = config(tmp_path, cells={"gpus": gpus}, slurm={"cells": {"gres": "gpu:8"}})
    assert node.devices(data, who, engine, {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_gpus_of_this_machine_follow_the_environment():
    assert node.gpus_here({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert node.gpus_here({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert node.gpus_here({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_more_or_fewer_ranks_than_the_configuration_has(tmp_path):
    check.world(config(tmp_path), LOCAL)
    with pytest.raises(UserError, match=r"3 cells \+ 1 host.* 4 ranks, but slurm started 5"):
        check.world(config(tmp_path), dataclasses.replace(SLURM, world_size=5))


def test_loopback_has_an_address():
    assert socket.inet_aton(node.interface_address("lo"))
