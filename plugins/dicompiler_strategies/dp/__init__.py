"""The strategy `dp`: CoopAI's dynamic programme, as printed and generalised. Problem → Plan.

coopai.py: the paper's formulas; paper.py: its decision as a plan. rows.py, boxes.py, team.py, moves.py, search.py: the
generalised search, from row tables to the recurrence. strategy.py: the options.
"""

from dicompiler_strategies.dp.strategy import Dp

__all__ = ["Dp"]
