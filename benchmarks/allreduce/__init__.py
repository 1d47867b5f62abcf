"""All-reduces of one float32 tensor over slow links, by this package and by others."""
