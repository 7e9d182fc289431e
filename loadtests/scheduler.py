"""What the scheduler costs; see ``loadtests/experiments/scheduler.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("scheduler")
