"""How many replicas, in simulated time; see ``loadtests/experiments/autoscaling/command.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("autoscaling.command")
