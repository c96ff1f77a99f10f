"""Gradient search: DIAPASON's continuous relaxation, as printed (paper.py) and with what closes its gap (relax.py).

Tables → Landscapes → probabilities → selections → polished selections;   Problem → Space → W_l, W_dev → parts.
"""
