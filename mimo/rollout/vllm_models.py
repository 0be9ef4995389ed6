"""Models that vLLM learns from this project, beside its own."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, NemotronHConfig, PreTrainedConfig

from mimo.refit.compat import complete_cpu_communicator

NEMOTRON_VL = "NemotronH_Nano_VL_V2"
DEEPSEEK = "DeepseekV3ForCausalLM"


class NemotronVlConfig(PreTrainedConfig):
    """config.json of a Nemotron VLM. Published folders bring their own code for it, which an engine here does not run.

    Args:
        vision_config: the RADIO encoder.
        llm_config: a `NemotronHConfig` as a dict.
        text_config: the same, under the other of its two names.
        values: all other keys.
    """

    model_type = NEMOTRON_VL

    def __init__(self, vision_config: dict[str, Any] | None = None, llm_config: dict[str, Any] | None = None,
                 text_config: dict[str, Any] | None = None, **values: Any) -> None:
        self.vision_config = PreTrainedConfig(**(vision_config or {}))
        self.text_config = NemotronHConfig(**(text_config or llm_config or {}))
        super().__init__(**values)


def register() -> None:
    """Make the models known. Later calls do nothing.

    vLLM calls this in each of its processes, through the entry point `vllm.general_plugins` in pyproject.toml.
    """
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    AutoConfig.register(NEMOTRON_VL, NemotronVlConfig, exist_ok=True)
    # By name, because importing the classes would start CUDA in processes that only read configurations.
    ModelRegistry.register_model(NEMOTRON_VL, "mimo.rollout.nemotron_vl:NemotronVl")
    ModelRegistry.register_model(DEEPSEEK, "mimo.rollout.deepseek:DeepseekV3")
    if current_platform.is_cpu():
        complete_cpu_communicator()
