"""Our engine beside its rivals; see ``loadtests/experiments/throughput.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.throughput import main

if __name__ == "__main__":
    main()
