"""What guessing tokens gains for one stream; see ``loadtests/experiments/speculation.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("speculation")
