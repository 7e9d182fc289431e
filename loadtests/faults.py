"""How long faults are felt; see ``loadtests/experiments/faults.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.faults import main

if __name__ == "__main__":
    main()
