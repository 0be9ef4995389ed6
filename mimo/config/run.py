"""All flags of a run in one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Self

from mimo import registry
from mimo.config.checkpoint import CheckpointConfig
from mimo.config.data import DataConfig
from mimo.config.ddp import DdpConfig
from mimo.config.layout import LayoutConfig
from mimo.config.model import ModelConfig
from mimo.config.observe import ObserveConfig
from mimo.config.optim import OptimConfig, ScheduleConfig
from mimo.config.train import TrainConfig


@dataclass(frozen=True)
class RunConfig:
    """A run: one section per concern, plus the provider's and the data set's own flags.

    Attributes:
        reads_prompts: the data set is one of prompts, which the first rank alone opens.
        family_defaults: defaults of the model provider's fields that are others in this kind of run, where it has them.
        model_family: an instance of the model provider's `Config`.
        dataset: an instance of the data provider's `Config`.
    """

    reads_prompts: ClassVar[bool] = False
    family_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    train: TrainConfig = field(default_factory=TrainConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    model_family: Any = None
    dataset: Any = None

    @property
    def lane_rows(self) -> int:
        """Rows of a lane's microbatch, which encoder ranks share where several serve one lane."""
        return self.train.micro_batch_size

    def resolved(self) -> Self:
        """The configuration with defaults filled in that depend on other flags."""
        return self

    @staticmethod
    def find_dataset(name: str) -> Any:
        """The data provider that `--dataset-provider` names. Raises ValueError for an unknown one."""
        return registry.dataset_provider(name)
