"""Accuracy against bits an element: codecs of the package, and other methods, on one recipe."""
