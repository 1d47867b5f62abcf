"""Methods that are not part of the package, for comparison with its codecs."""
