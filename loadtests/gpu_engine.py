"""The engine on a GPU beside transformers; see ``loadtests/experiments/gpu_engine.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("gpu_engine")
