"""The exchanges: how one gradient's messages get from rank to rank, in a graph."""
