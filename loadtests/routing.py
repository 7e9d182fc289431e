"""How well requests are routed, in simulated time; see ``loadtests/experiments/routing/command.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.routing.command import main

if __name__ == "__main__":
    main()
