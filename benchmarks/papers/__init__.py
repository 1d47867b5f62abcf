"""The papers' own experiments, with this package's codecs: ``python -m benchmarks.papers``."""
