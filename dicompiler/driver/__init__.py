"""Compilation of a model into an artifact, and functions that run, install and verify artifacts."""
