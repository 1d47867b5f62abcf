"""Collectives of ``torch.distributed``, the order in which they start, and the steps that use them."""
