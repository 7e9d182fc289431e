"""Routing on real Ray Serve: ``python -m loadtests.routing --live``."""
