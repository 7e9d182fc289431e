"""How well KV memory is used, in simulated time; see ``loadtests/experiments/memory/command.py``."""

from loadtests.report import from_checkout

with from_checkout():
    from loadtests.experiments.memory.command import main

if __name__ == "__main__":
    main()
