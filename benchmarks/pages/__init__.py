"""Tables and pictures of measurements in the documentation, rendered from the committed records."""
