"""Measurement of boards: profiles of layers, costs of runtimes, speeds of links, and corrections by measured runs."""
