"""A route is what the newest table says, and nothing else."""

from gyre.proxy.routing import Route, RouteTable


def entry(epoch=1, policy=0):
    return {"url": "http://e", "epoch": epoch, "policy": policy}


def test_routes_follow_engines_and_moves():
    table = RouteTable()
    table.assign(7, 0)
    assert table.route(7) is None
    assert table.apply(1, {"0": entry(), "1": entry(4)}, {})
    assert table.route(7) == Route(0, "http://e", 1, 0)
    assert table.apply(2, {"0": None}, {"7": 1, "8": 1})
    assert table.route(7) == Route(1, "http://e", 4, 0)
    assert table.route(8) is None, "it is another host's"
    table.forget(7)
    assert table.route(7) is None


def test_old_differences_change_nothing():
    table = RouteTable()
    table.assign(1, 0)
    table.apply(5, {"0": entry(3)}, {})
    assert not table.apply(5, {"0": None}, {}) and not table.apply(4, {"0": None}, {"1": 2})
    assert table.route(1).epoch == 3 and table.assigned(1) == 0


def test_a_snapshot_is_the_whole_table():
    table, copy = RouteTable(), RouteTable()
    table.apply(3, {"0": entry(1, 2), "1": entry(4)}, {})
    table.apply(4, {"1": None}, {})
    copy.apply(**table.snapshot())
    copy.assign(1, 0)
    assert copy.route(1) == Route(0, "http://e", 1, 2) and copy.version == 4


def test_a_route_may_say_where_keys_and_values_are_and_how_much_it_takes():
    table, copy = RouteTable(), RouteTable()
    table.assign(1, 0)
    table.apply(1, {"0": entry() | {"kv": "shm:a", "slots": 4}, "1": entry() | {"kv": None}}, {"1": 0})
    assert (table.route(1).kv, table.route(1).slots) == ("shm:a", 4)
    copy.apply(**table.snapshot())
    copy.assign(1, 1)
    assert (copy.route(1).kv, copy.route(1).slots) == ("", 0)
    table.apply(2, {}, {"1": None})
    assert table.route(1) is None, "it is held until it is sent elsewhere"


def test_a_new_policy_is_the_same_place():
    route = Route(0, "u", 1, 0)
    assert route.same_place(Route(0, "u", 1, 5)) and not route.same_place(Route(0, "u", 2, 0))
    assert not route.same_place(None)
