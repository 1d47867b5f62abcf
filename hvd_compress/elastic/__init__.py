"""Elastic Horovod in every framework: preserves unsent gradients when ranks are added or removed."""
