"""Routing while the fleet changes; see ``loadtests/experiments/routing_faults.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("routing_faults")
