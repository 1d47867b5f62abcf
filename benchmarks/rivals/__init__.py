"""Other methods, for comparison with this package's codecs."""
