"""How well requests are routed, in simulated time; see ``loadtests/experiments/routing/command.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("routing.command")
