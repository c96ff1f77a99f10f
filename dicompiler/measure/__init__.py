"""Measurement of boards: profiles of layers, runtimes and links, and calibration by measured runs."""
