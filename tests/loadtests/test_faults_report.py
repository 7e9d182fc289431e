"""What the fault measurements make of what they saw."""

from __future__ import annotations

import math
import time

import pytest

from loadtests.client import Outcome
from loadtests.cluster import seconds_until, wait_for
from loadtests.experiments.faults import delay, latency_figures
from loadtests.experiments.fleet import longest_pause, stream_figures, wrong_channels


def stream(text: str, reason: str | None = "length", done: bool = True) -> Outcome:
    chunks = [{"choices": [{"text": letter, "finish_reason": None}]} for letter in text]
    chunks.append({"choices": [{"text": "", "finish_reason": reason}]})
    return Outcome(200, chunks, [float(number) for number in range(len(chunks))], done)


def engine(channels: int) -> dict[str, object]:
    return {"channels": {str(number): {} for number in range(channels)}}


def test_a_disconnect_may_wait_for_the_step_that_runs() -> None:
    figures = latency_figures([0.05, 0.07, 0.26], [0.05, 0.05, 0.4])
    values = {figure.name: pytest.approx(figure.value) for figure in figures}
    assert values["disconnect to free blocks, median of 3 minus one step"] == 0.02
    assert [figure.holds for figure in figures] == [True, False]


def test_a_client_that_left_too_late_is_no_good_disconnect() -> None:
    left = Outcome(200, broken="TimeoutError: ", ended=5.0)
    assert delay(left, 5.1) == pytest.approx(0.1)
    assert delay(Outcome(200, [{}], ended=5.0), 5.1) == pytest.approx(0.1)
    assert [delay(left, 4.9), delay(Outcome(200, ended=5.0), 5.1)] == [math.inf, math.inf]
    assert not any(figure.holds for figure in latency_figures([0.1, math.inf], [0.05]))


@pytest.mark.parametrize(("channels", "wrong"), [([1, 1], 0), ([0, 2], 2), ([1], 1), ([], 2), ([2, 1], 1)])
def test_there_is_one_channel_for_each_ingress_and_engine(channels: list[int], wrong: int) -> None:
    states = [engine(count) for count in channels]
    assert wrong_channels(states) == wrong


def test_streams_must_be_complete_and_say_the_same() -> None:
    expected = [stream("one"), stream("two"), stream("three"), stream("four")]
    broken = stream("three")
    broken.events.append({"error": {"message": "gone"}})
    outcomes = [stream("one"), stream("tow"), broken, stream("fo", None, done=False)]
    complete, same, pause = stream_figures("killed", outcomes, expected)
    assert (complete.value, complete.bar, complete.holds) == (2, 4, False)
    assert (same.value, same.bar, same.holds) == (1, 4, False)
    assert (pause.value, pause.bar) == (1.0, None)
    assert all(figure.holds for figure in stream_figures("killed", expected, expected))


def test_the_longest_pause_is_between_chunks_of_one_stream() -> None:
    assert longest_pause([]) == 0.0
    assert longest_pause([Outcome(times=[5.0]), Outcome(times=[1.0, 1.5, 3.5, 3.6])]) == 2.0


def test_waiting_that_never_ends_shows() -> None:
    assert seconds_until(lambda: True, 10.0) < 10.0
    assert seconds_until(lambda: False, 0.02, 0.001) >= 0.02
    began = time.monotonic()
    assert wait_for(lambda: time.monotonic() > began, 10.0, "time stands still")
    with pytest.raises(TimeoutError, match="after 0 s: nothing came"):
        wait_for(lambda: False, 0.0, "nothing came")
