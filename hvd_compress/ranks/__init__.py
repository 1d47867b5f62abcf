"""The matters that the ranks of a job agree on: settings, participants, their number, and counts.

Depends on no framework and on no codec.
"""
