"""The time of one routing decision; see ``loadtests/experiments/routing_speed.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.routing_speed import main

if __name__ == "__main__":
    main()
