"""Collectives of ``torch.distributed``, the order of their starts, and the steps that use them."""
