"""Our engine beside its rivals; see ``loadtests/experiments/throughput.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("throughput")
