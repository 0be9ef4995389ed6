"""Names to providers and rewards: a built-in name, or `pkg.module:attr` for anything outside the tree."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimo.rl.prompts import Reward

MODEL_PROVIDERS = {
    "causal_lm": "providers.causal_lm:provider",
    "deepseek_v3": "providers.deepseek_v3:provider",
    "llava": "providers.llava:provider",
    "llava_next": "providers.llava_next:provider",
    "mock": "providers.mock:provider",
    "nemotron-moe-vlm-20l": "providers.nemotron_moe_vlm:provider_20l",
    "nemotron-moe-vlm-54l": "providers.nemotron_moe_vlm:provider_54l",
    "nemotron-moe-vlm-tiny": "providers.nemotron_moe_vlm:provider_tiny",
    "nemotron_h": "providers.nemotron_h:provider",
    "qwen2_5_vl": "providers.qwen2_5_vl:provider",
    "qwen3_vl": "providers.qwen3_vl:provider",
}
DATASET_PROVIDERS = {
    "arithmetic": "data.arithmetic:provider",
    "conversations": "data.conversation_files.provider:provider",
    "digits": "data.digits:provider",
    "energon": "data.energon.provider:provider",
    "mock": "data.mock:provider",
}
PROMPT_PROVIDERS = {
    "arithmetic": "data.arithmetic:provider",
    "conversations": "data.conversation_files.prompts:provider",
    "digits": "data.digits:prompt_provider",
    "gsm8k": "data.gsm8k:provider",
}
REWARDS = {
    "exact-match": "mimo.rl.rewards.short_answers:exact_match",
    "gsm8k": "mimo.rl.rewards.gsm8k:reward",
    "math-verify": "mimo.rl.rewards.short_answers:math_verify",
    "multiple-choice": "mimo.rl.rewards.short_answers:multiple_choice",
}
# Rewards that work with a package that only some extras install: distribution and module.
REWARD_PACKAGES = {name: ("math-verify", "math_verify") for name in ("gsm8k", "math-verify")}


def resolve(name: str, flag: str, known: dict[str, str]) -> Any:
    """Import the provider that `name` stands for.

    Args:
        name: a key of `known`, or `pkg.module:attr`.
        flag: the flag that carried the name, for messages.
        known: built-in names.

    Raises:
        ValueError: the name is unknown, or the module or attribute does not exist.
    """
    target = known.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise ValueError(
            f"{flag} {name}: unknown; built in are {', '.join(sorted(known))}, others are named pkg.module:attr"
        )
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ValueError(f"{flag} {name}: there is no module {module_name!r}") from error
    if attribute not in vars(module):
        raise ValueError(f"{flag} {name}: module {module_name!r} has no attribute {attribute!r}")
    return vars(module)[attribute]


def model_provider(name: str) -> Any:
    """Return the model provider that `--model-provider` names. Raises ValueError for an unknown one."""
    return resolve(name, "--model-provider", MODEL_PROVIDERS)


def dataset_provider(name: str) -> Any:
    """Return the data provider that `--dataset-provider` names. Raises ValueError for an unknown one."""
    return resolve(name, "--dataset-provider", DATASET_PROVIDERS)


def prompt_provider(name: str) -> Any:
    """Return the prompt data set that `--dataset-provider` names in train_rl.py. Raises ValueError if unknown."""
    return resolve(name, "--dataset-provider", PROMPT_PROVIDERS)


def reward(name: str) -> Reward:
    """Return the reward that `--reward` names. Raises ValueError if it is unknown or its package is missing."""
    if name in REWARD_PACKAGES:
        package, module = REWARD_PACKAGES[name]
        if find_spec(module) is None:
            raise ValueError(f"--reward {name} needs the package {package}, which is not installed: "
                             f"pip install {package}")
    found: Reward = resolve(name, "--reward", REWARDS)
    if not callable(found):
        raise ValueError(f"--reward {name}: {found!r} cannot be called")
    return found


def provider_of(architecture: str) -> str | None:
    """Return the built-in model provider for an architecture, as in `architectures` of a config.json; or None."""
    for name in MODEL_PROVIDERS:
        provider = model_provider(name)
        if hasattr(provider, "hf_architectures") and architecture in provider.hf_architectures:
            return name
    return None


def provider_of_config(values: Mapping[str, Any], source: str) -> str | None:
    """Return the built-in model provider for a config.json; None if it names no architecture.

    Args:
        values: content of the file.
        source: the file, for messages.

    Raises:
        ValueError: it names architectures of no built-in model.
    """
    found = values.get("architectures")
    architectures = [str(name) for name in found] if isinstance(found, list) else []
    for architecture in architectures:
        name = provider_of(architecture)
        if name is not None:
            return name
    if architectures:
        raise ValueError(f"{source} names the architecture {', '.join(architectures)}, of no built-in model; give "
                         f"--model-provider, one of {', '.join(sorted(MODEL_PROVIDERS))} or pkg.module:attr")
    return None
