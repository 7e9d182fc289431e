"""How long faults are felt; see ``loadtests/experiments/faults.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("faults")
