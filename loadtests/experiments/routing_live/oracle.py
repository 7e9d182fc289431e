"""Recorded arrivals, served once more by a simulated fleet: what would have been found cached there."""

from __future__ import annotations

from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.fleet import Fleet, Record
from loadtests.experiments.routing.workloads import Job, Source, Workload
from loadtests.experiments.routing_live.recording import Recording
from loadtests.experiments.simulated_replica import ReplicaConfig, StepCost


def replay(recording: Recording, arm: Arm = Arm.ORACLE) -> list[Record]:
    """The requests of a recording as ``arm`` routes them, in simulated seconds.

    Arrivals, lengths, pools and rules of admission are the recording's, a step takes what the live engines said
    of theirs. Requests that failed came as well, if it is known how long they were.
    """
    fleet = recording.fleet
    cost = StepCost(fleet.step_base, 1 / fleet.prefill_rate, fleet.step_per_row, fleet.step_per_kv_token)
    config = ReplicaConfig(
        cost,
        fleet.num_blocks,
        fleet.block_size,
        fleet.token_budget,
        max_num_seqs=fleet.max_num_seqs,
        kv_events=True,
    )
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
    return Fleet(arm, Workload(jobs), config, replicas=fleet.replicas, seed=fleet.seed).run().records
