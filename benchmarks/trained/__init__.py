"""A text model that is trained until it is better than a table of n-grams, with each codec."""
