"""Algorithms and environments built only on the public hooks."""
