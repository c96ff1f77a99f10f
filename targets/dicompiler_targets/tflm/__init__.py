"""The target `tflm`: firmware for microcontrollers with TFLite-micro."""

from __future__ import annotations

from dicompiler_targets.tflm.target import TflmTarget

__all__ = ["TflmTarget"]
