"""Which runs are made in which order, and what can be said when only some of them are done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from loadtests.experiments.routing.constants import SEEDS
from loadtests.experiments.routing.runs import Run, Summary, simulate_all
from loadtests.experiments.routing.scenarios import Results, Scenario
from loadtests.findings import Findings
from loadtests.report import Figure


class Part:
    """One scenario while its runs come in."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.name = name
        self.scenario = scenario
        self.findings: Findings | None = None
        """As of the last time that there was enough to judge."""
        self.seeds = 0
        """So many seeds are judged."""
        self._summaries: dict[Run, Summary] = {}

    @property
    def complete(self) -> bool:
        """Whether no run is missing."""
        return len(self._summaries) == len(self.scenario.runs)

    def add(self, run: Run, summary: Summary) -> bool:
        """Take in one run; true if there is more to judge than before: the first seed, or all."""
        self._summaries[run] = summary
        first = all(run in self._summaries for run in self.scenario.runs if run.seed == 1)
        if not self.complete and (self.findings is not None or not first):
            return False
        self.seeds = max(run.seed for run in self.scenario.runs) if self.complete else 1
        self.findings = self._judge()
        return True

    def _judge(self) -> Findings:
        results: Results = {}
        lost = 0
        for run in self.scenario.runs:
            if run.seed <= self.seeds:
                summary = self._summaries[run]
                results.setdefault((run.name, run.arm), []).append(summary)
                lost += 0 if run.saturated else summary.unfinished
        findings = self.scenario.judge(results)
        findings.figures.append(Figure(f"{self.name}: requests without an end", lost, "", 0, True))
        return findings


def simulate_parts(parts: Mapping[str, Part], workers: int) -> Iterator[tuple[Part, Run, Summary, bool]]:
    """Make all runs; whenever one has ended: its part, and whether there is more to judge.

    The first seed of every scenario comes first, so that a run that is cut off leaves something of each; the
    longest ones come neither first nor last.
    """
    several = len(SEEDS)
    first = [
        (part, run)
        for part in parts.values()
        for run in part.scenario.runs
        if run.seed == 1 or max(one.seed for one in part.scenario.runs) > several
    ]
    done = {run for _, run in first}
    later = [
        (part, run) for part in reversed(list(parts.values())) for run in part.scenario.runs if run not in done
    ]
    later.sort(key=lambda at: at[1].seed)
    order = first + later
    for place, summary in simulate_all([run for _, run in order], min(workers, len(order))):
        part, run = order[place]
        yield part, run, summary, part.add(run, summary)
