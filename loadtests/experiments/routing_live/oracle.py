"""Recorded arrivals, served once more by a simulated fleet: what would have been found cached there."""

from __future__ import annotations

from functools import partial

from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.constants import Service
from loadtests.experiments.routing.fleet import Fleet, Record
from loadtests.experiments.routing.replica import Replica
from loadtests.experiments.routing.workloads import Job, Source, Workload
from loadtests.experiments.routing_live.recording import Recording


def replay(recording: Recording, arm: Arm = Arm.ORACLE) -> list[Record]:
    """The requests of a recording as ``arm`` routes them, in simulated seconds.

    Arrivals, lengths, pools and rules of admission are the recording's, a step takes what the live engines said
    of theirs. Requests that failed came as well, if it is known how long they were.
    """
    fleet = recording.fleet
    service = Service(fleet.prefill_rate, fleet.step_base, fleet.step_per_row, fleet.step_per_kv_token)
    source = Source(fleet.seed)
    systems = {
        group: source.prompt(fleet.system_tokens)
        for group in sorted({one.prompt_group for one in recording.arrivals})
    }
    jobs = [
        Job(
            number,
            one.t,
            source.prompt(one.prompt_tokens - fleet.system_tokens, systems[one.prompt_group]),
            one.output_tokens,
            one.output_tokens,
        )
        for number, one in enumerate(recording.arrivals)
        if one.prompt_tokens > fleet.system_tokens and one.output_tokens
    ]
    make = partial(Replica, service=service, token_budget=fleet.token_budget, max_num_seqs=fleet.max_num_seqs)
    simulated = Fleet(
        arm, Workload(jobs), replicas=fleet.replicas, blocks=fleet.num_blocks, seed=fleet.seed, make=make
    )
    return simulated.run().records
