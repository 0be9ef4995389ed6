"""Reads flags and configuration files into a `RunConfig`.

The fields of every section are flat flags under Megatron's names (`--micro-batch-size`). The model provider and the
data provider on the command line add the fields of their own `Config`. Flags win over `--config` files, later files
over earlier ones, and files over defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Protocol, get_args, runtime_checkable

import tyro

from mimo import registry
from mimo.config import toml_file
from mimo.config.flag_hints import hint_for, refuse_foreign_flags
from mimo.config.trainer import RunConfig
from mimo.protocols import (
    ComparableProvider,
    ImageDataProvider,
    ImageProcessing,
    ImageProcessingProvider,
    StagedProvider,
    VideoDataProvider,
    VideoProcessing,
    VideoProcessingProvider,
)
from mimo.weights import hub

DESCRIPTION = """Train a multimodal model whose encoder and language model live on separate process grids.

Flags win over --config files, and later files win over earlier ones. The keys of a file are flag names."""
# Fields of any section that take the folder of a Hugging Face model, or its id on the hub.
HF_FOLDERS = ("load_hf", "load_vision_from", "load_language_from", "ref_load_hf", "hf_config", "tokenizer")
# The flags that `train_hetero.py --help` opens with.
FIRST_FLAGS = {
    "--config FILE": "Read flags from a TOML file. The flags that you type win.",
    "--model-provider NAME": "Model family, such as llava, causal_lm, nemotron_h or mock (docs/providers.md).",
    "--dataset-provider NAME": "Data set: conversations (JSONL, JSON and Parquet files), energon (shards), digits or "
                               "mock (which need no files).",
    "--encoder-dp N": "Number of encoder replicas. --encoder-tp splits each of them over several ranks.",
    "--llm-tp N": "Split the language model over N ranks. --llm-dp sets the number of its replicas.",
    "--global-batch-size N": "Samples in one iteration.",
    "--train-iters N": "Number of iterations.",
    "--lr X": "Peak learning rate. --encoder-lr and --projector-lr set it for the other parts.",
    "--save FOLDER": "Write checkpoints to this folder. --load with the same folder resumes the run.",
    "--dry-run": "Check all flags and print the plan, without a GPU and without starting anything.",
}


@dataclasses.dataclass(frozen=True)
class FileConfig:
    """Configuration files."""

    config: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """TOML file whose keys are flag names; may be given several times, later files win."""
    print_config: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the resolved configuration as TOML and exit."""


def parse(argv: list[str] | None = None) -> RunConfig:
    """Read the command line of a training run; see `parse_as`."""
    return parse_as(RunConfig, argv, DESCRIPTION, FIRST_FLAGS)


def parse_as[C: RunConfig](run_type: type[C], argv: list[str] | None, description: str,
                           first_flags: Mapping[str, str] = MappingProxyType({})) -> C:
    """Read the command line of a run of any kind.

    Exits, as a command line does, after `--help` and `--print-config`, and with code 2 on a flag that tyro refuses.

    Args:
        run_type: the kind of run.
        argv: the command line; None reads `sys.argv`.
        description: first lines of the help.
        first_flags: flags that `--help` shows, with their help; `--help all` shows every flag. Without them `--help`
            shows every flag.

    Raises:
        ValueError: a file, key, value or provider that cannot be used; the message names it.
    """
    argv = sys.argv[1:] if argv is None else argv
    asks_for_help = any(word in ("-h", "--help") and argv[place + 1 : place + 2] != ["all"]
                        for place, word in enumerate(argv))
    if first_flags and asks_for_help:
        # Nothing has been read yet, so help works even if a file or a provider cannot be used.
        if _prints():
            print(_first_help(run_type, description, first_flags))
        raise SystemExit(0)
    # The providers decide which flags exist, so they are read first: from the command line, the files or the defaults.
    known = _prescan(argv)
    names = [field.name for field in dataclasses.fields(run_type)]
    files = [(path, toml_file.read(path, names)) for path in known.config]
    merged: dict[str, Any] = {}
    for _, values in files:
        merged.update(values)
    defaults = run_type()
    sections = {field.name: type(getattr(defaults, field.name)) for field in dataclasses.fields(run_type)
                if getattr(defaults, field.name) is not None}
    model = known.model_provider or merged.get("model_provider")
    if model is None:
        model = _family_of(known.hf_config or merged.get("hf_config")) or defaults.model.model_provider
    dataset = known.dataset_provider or merged.get("dataset_provider", defaults.data.dataset_provider)
    sections["model_family"] = _config_type(registry.model_provider(str(model)), f"--model-provider {model}")
    sections["dataset"] = _config_type(run_type.find_dataset(str(dataset)), f"--dataset-provider {dataset}")
    every: dict[str, type] = {"files": FileConfig, **sections}
    _refuse_shared_names(every)
    # Values of files become the defaults of the flags.
    instances = _apply_files(sections, files, run_type.family_defaults)
    instances["model"] = dataclasses.replace(instances["model"], model_provider=str(model))
    if not {"-h", "--help"} & set(argv):
        refuse_foreign_flags(argv, [name for section in every.values() for name in toml_file.typed_fields(section)])
    titles = {"model_family": f"{model} model" if model in registry.MODEL_PROVIDERS else "model-family",
              "dataset": f"{dataset} data" if ":" not in str(dataset) else "dataset"}
    flags = _parse_flags(instances, titles, argv, description)
    config = run_type(**{name: getattr(flags, name) for name in sections})
    if flags.files.print_config:
        if _prints():
            print(to_toml(config.resolved()), end="")
        raise SystemExit(0)
    if known.dataset_provider is None and "dataset_provider" not in merged:
        _refuse_default_data(config)
    config = with_local_folders(config)
    _refuse_replaced_flags(config, argv)
    return with_media_processing(with_tokenizer(with_training_stage(config)))


def _refuse_default_data(config: RunConfig) -> None:
    """Raise ValueError if a pretrained language model would get the default data set, whose token ids are its own.

    That of train_rl.py may have the model's tokenizer.
    """
    if vars(config.dataset).get("tokenizer"):
        return
    for name in ("load_hf", "load_language_from"):
        folder = getattr(config.checkpoint, name)
        if folder:
            raise ValueError(f"{toml_file.flag_name(name)} {folder} needs --dataset-provider: the default, "
                             f"{config.data.dataset_provider}, has a vocabulary of its own")


def _refuse_replaced_flags(config: RunConfig, argv: list[str]) -> None:
    """Raise ValueError if --hf-config would replace the value of a flag of the command line.

    It may replace values of --config files, so that a recipe can have sizes that stand in for those of a real model.
    """
    provider, family = registry.model_provider(config.model.model_provider), config.model_family
    source = vars(family).get("hf_config")
    if not source or not isinstance(provider, ComparableProvider):
        return
    typed = {word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in argv}
    names = [name for name in vars(family) if name != "hf_config" and toml_file.flag_name(name) in typed]
    if not names:
        return
    given, resolved = vars(family), vars(provider.resolved(family))
    replaced = [f"{toml_file.flag_name(name)} ({resolved[name]})" for name in names if resolved[name] != given[name]]
    if replaced:
        raise ValueError(f"--hf-config {source} has another value for {', '.join(replaced)}: leave these flags out, or "
                         "change a copy of config.json")


def with_local_folders[C: RunConfig](config: C) -> C:
    """Return the configuration with local folders in place of models of the hub, whose small files are downloaded.

    Raises:
        ValueError: a flag names neither a folder nor a model that the hub or its cache has.
    """
    changed: dict[str, Any] = {}
    for title, section in vars(config).items():
        fields = {} if section is None else vars(section)
        given = {name: value for name, value in fields.items() if name in HF_FOLDERS and value}
        folders = {name: hub.local_folder(toml_file.flag_name(name), value) for name, value in given.items()}
        if folders != given:
            changed[title] = dataclasses.replace(section, **folders)
    return dataclasses.replace(config, **changed)


def with_training_stage[C: RunConfig](config: C) -> C:
    """Return the configuration with the parts frozen that the provider's training stage freezes.

    A stage that freezes nothing leaves --freeze as it is, for example stage 2 with a frozen encoder.

    Raises:
        ValueError: --freeze names other parts than the stage.
    """
    provider = registry.model_provider(config.model.model_provider)
    if not isinstance(provider, StagedProvider) or not config.model_family.training_stage:
        return config
    stage = config.model_family.training_stage
    parts = provider.frozen_parts(config.model_family)
    if not parts:
        return config
    frozen = ",".join(sorted(parts))
    if config.model.freeze and config.model.frozen != parts:
        raise ValueError(f"--freeze {config.model.freeze} with --training-stage {stage}, which freezes {frozen}: give "
                         "one of them")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=frozen))


def without_training_stage[C: RunConfig](config: C) -> C:
    """Return the configuration without the frozen parts that `with_training_stage` filled in, for the next stage."""
    provider = registry.model_provider(config.model.model_provider)
    if not isinstance(provider, StagedProvider) or not config.model_family.training_stage:
        return config
    if config.model.frozen != provider.frozen_parts(config.model_family):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=""))


@runtime_checkable
class TokenizedDataProvider(Protocol):
    """A data set that takes the model's tokenizer if its flags name none."""

    def with_tokenizer(self, config: Any, folders: Sequence[str]) -> Any:
        """Return the flags with a tokenizer filled in.

        The Hugging Face folders are those of the model, the preferred one first.
        """
        ...


def with_tokenizer[C: RunConfig](config: C) -> C:
    """Fill in the data set's tokenizer from the model's folders, and return the configuration."""
    dataset, flags = config.find_dataset(config.data.dataset_provider), config.checkpoint
    if not isinstance(dataset, TokenizedDataProvider):
        return config
    folders = [flags.load_hf, flags.load_language_from, vars(config.model_family).get("hf_config", "")]
    filled = dataset.with_tokenizer(config.dataset, [folder for folder in folders if folder])
    return dataclasses.replace(config, dataset=filled)


def with_media_processing[C: RunConfig](config: C) -> C:
    """Fill in the data set's flags of images and videos from the model, so that checkpoints hold them.

    The values come from the processor files beside --hf-config, --load-hf and --load-vision-from, or else from the
    family's own processor.

    Raises:
        ValueError: a file cannot be followed, two files disagree, or there are flags of videos for a model without.
    """
    provider = registry.model_provider(config.model.model_provider)
    if not provider.encoders(config.model_family):
        return config
    dataset = config.find_dataset(config.data.dataset_provider)

    # Called by a data set whose flags leave something open, because the model may have no processor files.
    def of_images() -> list[ImageProcessing]:
        return _processings(config, provider.image_processing) if isinstance(provider, ImageProcessingProvider) else []

    def of_videos() -> list[VideoProcessing]:
        return _processings(config, provider.video_processing) if isinstance(provider, VideoProcessingProvider) else []

    filled = config.dataset
    if isinstance(dataset, ImageDataProvider):
        filled = dataset.with_image_processing(filled, of_images)
    if isinstance(dataset, VideoDataProvider):
        filled = dataset.with_video_processing(filled, of_videos)
    return dataclasses.replace(config, dataset=filled)


def _processings[P](config: RunConfig, read: Callable[..., P | None]) -> list[P]:
    """Return what the processor files of the model's folders specify, or else the family's own processor."""
    family, flags = config.model_family, config.checkpoint
    folders = dict.fromkeys([vars(family).get("hf_config", ""), flags.load_hf, flags.load_vision_from])
    found = [each for folder in folders if folder and (each := read(family, folder)) is not None]
    own = None if found else read(family)
    return found if own is None else [own]


def to_toml(config: RunConfig) -> str:
    """Return the configuration as TOML, which `--config` reads back to an equal one."""
    return toml_file.dump({field.name: getattr(config, field.name) for field in dataclasses.fields(config)
                           if getattr(config, field.name) is not None})


def _first_help(run_type: type[RunConfig], description: str, first_flags: Mapping[str, str]) -> str:
    """Return the short help: the flags to start with, and how to see the others."""
    prog, run, width = Path(sys.argv[0]).name, run_type(), min(shutil.get_terminal_size().columns, 120)
    indent = max(map(len, first_flags)) + 4
    sections, flags = [section for section in vars(run).values() if section is not None], []
    for flag, text in first_flags.items():
        name = flag.split()[0].removeprefix("--").replace("-", "_")
        values = [vars(section)[name] for section in sections if name in vars(section)]
        # None, an empty text and False are not worth showing.
        default = f" (default: {values[0]})" if values and values[0] not in (None, "", False) else ""
        flags.append(textwrap.fill(f"  {flag:{indent - 2}}{text}{default}", width, subsequent_indent=" " * indent,
                                   break_on_hyphens=False))
    groups = ", ".join(field.name for field in dataclasses.fields(run_type) if getattr(run, field.name) is not None)
    return "\n".join([
        f"usage: {prog} [flags]", f"       torchrun --nproc-per-node N {prog} [flags]", "",
        description.partition("\n")[0], "", "Start with these flags:", *flags, "",
        *textwrap.wrap(f"--help all prints every flag by group: {groups}, and the flags of the model and the data set "
                       f"that you name ({prog} --model-provider mock --help all).", width, break_on_hyphens=False)])


def _prints() -> bool:
    """Return whether this rank prints. Under torchrun every rank parses, and the first one prints."""
    return os.environ.get("RANK", "0") == "0"


def typed_providers(argv: Sequence[str]) -> dict[str, str | None]:
    """Return the model and data providers named on a command line, by field; None for one that is not named."""
    known = _prescan(argv)
    return {"model_provider": known.model_provider, "dataset_provider": known.dataset_provider}


def config_files(argv: Sequence[str]) -> list[str]:
    """Return the paths that --config gives on a command line."""
    return list(_prescan(argv).config)


def _prescan(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags that decide which other flags exist."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--model-provider", "--model_provider")
    parser.add_argument("--dataset-provider", "--dataset_provider")
    parser.add_argument("--hf-config", "--hf_config")
    return parser.parse_known_args(argv)[0]


def _family_of(hf_config: Any) -> str | None:
    """Return the built-in model family of a value of --hf-config; None if its file cannot be read or names none.

    Raises:
        ValueError: the file names an architecture of no built-in model.
    """
    if not hf_config or not isinstance(hf_config, str):
        return None  # a value of another type in a file is refused together with those of other flags
    path = Path(hub.local_folder("--hf-config", hf_config))
    try:
        values = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    # The family that reads the file says what is wrong with it.
    return registry.provider_of_config(values, f"--hf-config {hf_config}") if isinstance(values, dict) else None


def _config_type(provider: Any, flag: str) -> type:
    """Return the provider's `Config` dataclass. Raises ValueError unless all its fields have defaults."""
    config_type = provider.Config if hasattr(provider, "Config") else None
    if not isinstance(config_type, type) or not dataclasses.is_dataclass(config_type):
        raise ValueError(f"{flag}: {provider!r} has no Config dataclass")
    for field in dataclasses.fields(config_type):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{flag}: field {field.name!r} of its Config has no default")
    return config_type


def _refuse_shared_names(sections: dict[str, type]) -> None:
    """Raise ValueError if two sections have a field of the same name, because fields become flat flags."""
    owners: dict[str, type] = {}
    for section in sections.values():
        for name in toml_file.typed_fields(section):
            if name in owners:
                both = " and ".join(f"{owner.__module__}.{owner.__qualname__}" for owner in (owners[name], section))
                raise ValueError(f"{toml_file.flag_name(name)} is a field of both {both}; rename one of them")
            owners[name] = section


def _apply_files(sections: dict[str, type], files: list[tuple[str, dict[str, Any]]],
                 family_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Build the sections from the values of the files and, below these, the run's defaults for a model family."""
    owners = {name: (title, annotation) for title, section in sections.items()
              for name, annotation in toml_file.typed_fields(section).items()}
    toml_file.check_known({name: path for path, values in files for name in values if name not in owners},
                          list(owners), hint_for)
    changes: dict[str, dict[str, Any]] = {title: {} for title in sections}
    family_fields = toml_file.typed_fields(sections["model_family"])
    changes["model_family"] |= {name: value for name, value in family_defaults.items() if name in family_fields}
    for path, values in files:
        for name, value in values.items():
            title, annotation = owners[name]
            try:
                changes[title][name] = toml_file.convert(value, annotation)
            except ValueError as error:
                raise ValueError(f"--config {path}: {toml_file.flag_name(name)[2:]} = {value!r}: {error}") from error
    return {title: section(**changes[title]) for title, section in sections.items()}


def _parse_flags(instances: dict[str, Any], titles: dict[str, str], argv: list[str], description: str) -> Any:
    """Run tyro over one dataclass that has every section as a field."""
    specs: list[tuple[str, Any, Any]] = []
    for name, instance in {"files": FileConfig(), **instances}.items():
        title = tyro.conf.arg(name=titles.get(name, name))
        specs.append((name, Annotated[type(instance), title], dataclasses.field(default=instance)))
    flags = dataclasses.make_dataclass("Flags", specs, frozen=True)
    constructors = tyro.constructors.ConstructorRegistry()
    constructors.primitive_rule(_optional_rule)
    return tyro.cli(flags, args=argv, prog=Path(sys.argv[0]).name, description=description, registry=constructors,
                    console_outputs=_prints(),
                    # Help is in the strings below the fields. Looking for comments, too, would double the time.
                    config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes,
                            tyro.conf.HelptextFromCommentsOff))


def _optional_rule(info: Any) -> Any:
    """Parse an `X | None` field so that the help shows X, not `{None}|X`.

    The word `none` unsets a value that a file has set.
    """
    options = [option for option in get_args(info.type) if option is not type(None)]
    if len(options) != 1 or len(get_args(info.type)) != 2 or options[0] not in (int, float, str):
        return None
    kind = options[0]

    def read(words: list[str]) -> Any:
        return None if words[0] in toml_file.NONE_WORDS else kind(words[0])

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar=kind.__name__.upper(), instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: ["none" if value is None else str(value)])
