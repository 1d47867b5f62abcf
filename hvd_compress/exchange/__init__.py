"""Exchanges: who gets the payloads, and what ranks have to agree on first.

Knows collectives and payloads, never a framework or the inside of a codec.
"""
