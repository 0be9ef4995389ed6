"""Parts of a step as the page shows them: their order, their words and the classes of their colours."""

from __future__ import annotations

from mimo.observe.spans import Kind

OTHER_MODULES = "other-modules"
# Work is solid, waits are hatched: also for readers who see no colours.
WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.GRADIENT_SYNC, Kind.OPTIMIZER)
WAITS = (Kind.BRIDGE_WAIT, Kind.PIPELINE_WAIT, Kind.DATA_WAIT, Kind.IDLE)
PASSES = (Kind.FORWARD, Kind.BACKWARD)
ORDER: tuple[str, ...] = (*map(str, WORK), OTHER_MODULES, *map(str, WAITS), str(Kind.OTHER))
WORDS = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.GRADIENT_SYNC: "gradient reduction",
    Kind.OPTIMIZER: "optimizer", Kind.BRIDGE_WAIT: "waiting at the bridge",
    Kind.PIPELINE_WAIT: "waiting in the pipeline", Kind.DATA_WAIT: "waiting for data",
    Kind.IDLE: "waiting for all ranks", Kind.OTHER: "other",
    OTHER_MODULES: "other modules on the same ranks",
}
CSS_OF_PART = {WORDS[kind]: f"k-{kind}" for kind in ORDER}
