"""The kernels beside torch; see ``loadtests/experiments/kernels.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("kernels")
