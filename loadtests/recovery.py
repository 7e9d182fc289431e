"""What preemption and recovery cost; see ``loadtests/experiments/recovery.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("recovery")
