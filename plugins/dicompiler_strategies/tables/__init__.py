"""Cost tables for strategies that search: the choices of every layer, their footprints, and their costs as NumPy arrays."""
