"""The strategy `autodice`: the genetic search of AutoDiCE (Guo et al., 2022), as far as the paper describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dicompiler_strategies.genetic.strategy import Genetic


@dataclass(frozen=True)
class Autodice(Genetic):
    """The genetic search of the AutoDiCE paper: 400 generations, random initial plans.

    The search has stages on 2, 4, 8, … devices. Each stage has two levels. The first level evaluates many plans with a
    fast model. The second level evaluates a few of them one by one. The options are those of `genetic`.
    """

    name: ClassVar[str] = "autodice"
    as_printed: ClassVar[bool] = True
    default_generations: ClassVar[int] = 400
