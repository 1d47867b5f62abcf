"""The exchanges: how a bucket's encoded gradients get from rank to rank."""
