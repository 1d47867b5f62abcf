"""The exchanges: how a bucket's messages get from rank to rank, in a graph."""
