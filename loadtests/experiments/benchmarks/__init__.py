"""Benchmarks of single calls: ``python -m pytest loadtests/benchmarks``; ``make test`` does not run them.

``--check`` fails where a goal is missed, ``--benchmark-json=FILE`` writes all figures. On a machine that does
other work at the same time, ``--benchmark-timer=time.thread_time`` counts the thread's own time alone.
"""
