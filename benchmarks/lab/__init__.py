"""A lab of hosts with a real network between them, on one machine: ``python -m benchmarks.lab``."""
