"""The engine on a GPU beside transformers; see ``loadtests/experiments/gpu_engine.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.gpu_engine import main

if __name__ == "__main__":
    main()
