"""The exchanges: how one gradient's payloads get from rank to rank."""
