"""The planner: from measurements to how each gradient shall travel.

Decides the same from the same numbers, so that ranks which share their measurements need not share
decisions. Knows no framework and no collective: a frontend measures, and does what is decided.
"""
