"""Tables of measured figures in the documentation, rendered from the committed records."""
