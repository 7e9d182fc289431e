"""Does a real fleet follow its load? See ``loadtests/experiments/autoscale_live.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.autoscale_live import main

if __name__ == "__main__":
    main()
