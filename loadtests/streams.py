"""How many streams one ingress carries; see ``loadtests/experiments/streams.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("streams")
