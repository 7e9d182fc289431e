"""What preemption and recovery cost; see ``loadtests/experiments/recovery.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.recovery import main

if __name__ == "__main__":
    main()
