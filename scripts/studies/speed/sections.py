"""The sections of `scripts.studies.speed.bench_policies`, by name."""

from scripts.studies.buddymoe.measure_speed import buddymoe
from scripts.studies.dymoe.measure_speed import dymoe
from scripts.studies.dynaexq.measure_speed import dynaexq, dynaexq_wide
from scripts.studies.speed.cost import cost

QWEN3, MIXTRAL = "Qwen3-30B-A3B", "Mixtral-8x7B"
# Of each section: what runs it, its shape, and decode steps of a measurement.
SECTIONS = {
    "dynaexq": (dynaexq, QWEN3, 256),
    "dynaexq_wide": (dynaexq_wide, QWEN3, 232),
    "dymoe": (dymoe, MIXTRAL, 64),
    "buddymoe": (buddymoe, QWEN3, 128),
    "cost": (cost, QWEN3, 128),
}
PROMPTED = ("buddymoe", "dymoe", "dynaexq_wide")  # which measure prompts, where they are asked to
