"""The strategy `gradient`: a continuous relaxation of the cost tables, then local search."""
