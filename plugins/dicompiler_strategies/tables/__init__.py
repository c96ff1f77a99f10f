"""Cost tables for strategies that search: choices, footprints and costs as NumPy arrays."""
