"""What the ranks of a job agree on: settings, who takes part, how many they are, and what they count.

Depends on no framework and on no codec.
"""
