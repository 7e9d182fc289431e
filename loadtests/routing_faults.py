"""Routing while the fleet changes; see ``loadtests/experiments/routing_faults.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.routing_faults import main

if __name__ == "__main__":
    main()
