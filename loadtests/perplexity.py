"""What weights in fewer bits cost in quality; see ``loadtests/experiments/perplexity.py``."""

from loadtests.report import experiment

if __name__ == "__main__":
    experiment("perplexity")
