"""How many replicas, in simulated time; see ``loadtests/experiments/autoscaling/command.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.autoscaling.command import main

if __name__ == "__main__":
    main()
