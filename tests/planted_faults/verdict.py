"""What comes of a planted fault, and how much of a list was caught."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from tests.planted_faults.fault import Fault

BAR = 0.95
"""The least share of the faults that the tests must catch."""


class Verdict(Enum):
    """What came of a fault."""

    CAUGHT = "caught"
    HUNG = "caught: the tests hang"
    CRASHED = "caught: the tests crash"
    SURVIVED = "SURVIVED"
    UNDECIDED = "NOT DECIDED: too slow"
    BROKEN = "BROKEN: the tests do not run"

    @classmethod
    def of(cls, fault: Fault, status: int | None) -> Verdict:
        """``status`` is pytest's; negative: the signal that ended it; ``None``: it took too long."""
        if status is None:
            return cls.HUNG if fault.hangs else cls.UNDECIDED
        if status < 0:
            return cls.CRASHED
        return {0: cls.SURVIVED, 1: cls.CAUGHT}.get(status, cls.BROKEN)


MISSED = (Verdict.SURVIVED, Verdict.UNDECIDED, Verdict.BROKEN)


def summary(verdicts: Mapping[Fault, Verdict]) -> list[str]:
    """Lines to print: how many were caught, and each that was not."""
    missed = {fault: verdict for fault, verdict in verdicts.items() if verdict in MISSED}
    caught, undecided = len(verdicts) - len(missed), list(missed.values()).count(Verdict.UNDECIDED)
    lines = [f"{caught} of {len(verdicts)} planted faults were caught ({caught / len(verdicts):.1%})"]
    if undecided:
        lines.append(
            f"{undecided} not decided: the tests did not end in time. Run these again on an idle machine; if they "
            "hang there, too, and that is the symptom, say hangs=True in the list"
        )
    lines += [
        f"{verdict.value}: {fault.file}: {fault.why}\n  - {fault.old}\n  + {fault.new}"
        for fault, verdict in missed.items()
    ]
    return lines


def passes(verdicts: Mapping[Fault, Verdict]) -> bool:
    """Whether enough were caught, and every one was decided."""
    missed = [verdict for verdict in verdicts.values() if verdict in MISSED]
    return Verdict.UNDECIDED not in missed and len(missed) <= (1 - BAR) * len(verdicts)
