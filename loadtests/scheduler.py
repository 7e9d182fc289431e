"""What the scheduler costs; see ``loadtests/experiments/scheduler.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.scheduler import main

if __name__ == "__main__":
    main()
