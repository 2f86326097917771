"""Which vision tower each family of models has; shared/weights/families.py has the families themselves."""

from __future__ import annotations

from typing import Any

from actor.engine.towers.base import VisionTower
from actor.engine.towers.qwen3 import Qwen3Tower
from actor.engine.towers.qwen25 import Qwen25Tower

TOWERS: dict[str, type[VisionTower[Any]]] = {
    "qwen3_vl": Qwen3Tower,
    "qwen3_vl_moe": Qwen3Tower,
    "qwen2_5_vl": Qwen25Tower,
}
"""By config.json's model_type: the models that the engine runs."""
