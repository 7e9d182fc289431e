"""The time of one routing decision; see ``loadtests/experiments/routing_speed.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("routing_speed")
