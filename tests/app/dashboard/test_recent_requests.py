"""What an ingress remembers of requests: all that are live, the last ones that have ended, and no more."""

from __future__ import annotations

from dataclasses import dataclass

from app.dashboard.recent_requests import MAX_ENDED, MAX_PARTS, RecentRequests


@dataclass(eq=False)
class Request:
    request_id: str
    parts: int = 1


def test_live_ones_stay_and_ended_ones_go_in_turn() -> None:
    recent: RecentRequests[Request] = RecentRequests()
    live = Request("live")
    recent.begin(live)
    for number in range(MAX_ENDED + 1):
        ended = Request(str(number))
        recent.begin(ended)
        recent.end(ended)
    assert recent.find("live") == [live]
    assert recent.find("0") == []
    assert len(recent.find("1")) == 1
    recent.end(live)
    assert recent.find("live") == [live]
    assert recent.find("1") == []


def test_ids_need_not_be_unique_and_the_last_one_comes_first() -> None:
    recent: RecentRequests[Request] = RecentRequests()
    first, second, other = Request("a"), Request("a"), Request("b")
    for request in (first, other, second):
        recent.begin(request)
        recent.end(request)
    assert recent.find("a") == [second, first]


def test_requests_of_many_prompts_take_the_place_of_many() -> None:
    recent: RecentRequests[Request] = RecentRequests()
    large = [Request(str(number), MAX_PARTS // 2) for number in range(3)]
    for request in large:
        recent.begin(request)
        recent.end(request)
    assert [len(recent.find(request.request_id)) for request in large] == [0, 1, 1]


def test_a_request_of_several_prompts_is_found_by_the_engines_name_of_one() -> None:
    recent: RecentRequests[Request] = RecentRequests()
    several, one, named = Request("a", 12), Request("b"), Request("a-1")
    for request in (several, one, named):
        recent.begin(request)
    assert recent.find("a-11") == recent.find("a-0") == [several]
    assert recent.find("a-1") == [named, several]
    assert recent.find("a-12") == recent.find("a-01") == recent.find("a-") == recent.find("b-0") == []
