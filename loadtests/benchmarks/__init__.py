"""Benchmarks of single calls: ``python -m pytest loadtests/benchmarks``; ``make test`` does not run them."""
