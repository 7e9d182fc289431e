"""How well KV memory is used, in simulated time; see ``loadtests/experiments/memory/parts.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("memory.parts")
