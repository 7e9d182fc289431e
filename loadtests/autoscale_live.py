"""Does a real fleet follow its load? See ``loadtests/experiments/autoscale_live.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("autoscale_live")
