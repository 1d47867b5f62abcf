"""Exchanges: who gets the payloads, in which messages.

Knows collectives and payloads, never a framework or the inside of a codec.
"""
