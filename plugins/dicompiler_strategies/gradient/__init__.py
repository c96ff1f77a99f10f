"""The strategy `gradient`: a continuous relaxation of the cost tables after DIAPASON, followed by local search."""
