"""What one process knows of the replicas, told by one thread and heard by others."""

from __future__ import annotations

import threading

from app.routing.fleet import Fleet


def test_listeners_hear_of_memberships_in_their_order() -> None:
    fleet = Fleet()
    later = threading.Thread(target=fleet.set_members, args=(frozenset({"second"}),))
    heard: list[frozenset[str]] = []

    def listener(members: frozenset[str]) -> None:
        if members == {"first"}:
            later.start()
            later.join(0.2)  # it must not overtake
        heard.append(members)

    fleet.listen(listener)
    fleet.set_members(frozenset({"first"}))
    later.join()
    assert heard == [frozenset(), frozenset({"first"}), frozenset({"second"})]
    assert fleet.members == {"second"}


def test_a_listener_that_is_added_meanwhile_ends_with_the_newest_membership() -> None:
    fleet = Fleet()
    later = threading.Thread(target=fleet.set_members, args=(frozenset({"new"}),))
    heard: list[frozenset[str]] = []

    def listener(members: frozenset[str]) -> None:
        if not members:
            later.start()
            later.join(0.2)
        heard.append(members)

    fleet.listen(listener)
    later.join()
    assert heard == [frozenset(), frozenset({"new"})]
