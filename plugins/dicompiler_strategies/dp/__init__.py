"""The strategy `dp`: CoopAI's dynamic program, generalised to layer graphs, unequal devices and memory limits."""

from dicompiler_strategies.dp.strategy import Dp

__all__ = ["Dp"]
