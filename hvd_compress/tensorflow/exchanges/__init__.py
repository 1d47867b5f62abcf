"""The exchanges: the ways in which a bucket's messages travel between ranks, in a graph."""
