"""Cost tables for strategies that search: the ways to split each layer, with regions and costs as NumPy arrays."""
