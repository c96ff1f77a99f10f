"""Algorithms of the papers, as published."""
