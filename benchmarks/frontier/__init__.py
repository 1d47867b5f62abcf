"""Accuracy against bits per element: this package's codecs, and other methods, on one recipe."""
