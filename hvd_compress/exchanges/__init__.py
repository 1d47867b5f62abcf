"""Exchanges, which decide the messages and receivers of payloads.

This package knows collectives and payloads, but no framework and no codec's internals.
"""
