"""Where requests go in a fleet, in simulated time: see ``python -m loadtests.routing``."""
