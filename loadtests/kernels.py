"""The kernels beside torch; see ``loadtests/experiments/kernels.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.kernels import main

if __name__ == "__main__":
    main()
