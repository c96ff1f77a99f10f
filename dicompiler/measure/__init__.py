"""Measurements of boards and links, and the calibration of predictions by them."""
