"""Flags of the commands. Importing this needs no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from mimo import registry
from mimo.checkpoint import paths
from mimo.report.run_reader import FLAGS, METRICS
from mimo.weights import hub
from mimo.weights.configuration import CONFIG_JSON, read_config_json


@dataclass(frozen=True)
class InspectFlags:
    """Print what a checkpoint holds: for each module its tensors with shapes, dtypes, counts and bytes, the optimizer
    state, progress, random generators, data streams, and the grids it was saved on.

    A configuration given with --config, or as flags of a run after a lone --, is compared with it.
    """

    checkpoint: Positional[Annotated[str, arg(metavar="CHECKPOINT")]]
    """Folder of a run's checkpoints (--save), whose latest is taken, or one checkpoint's own folder."""
    ckpt_step: Annotated[int | None, arg(metavar="INT")] = None
    """Iteration to take instead of the latest."""
    config: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FILE")] = ()
    """TOML file of a run, such as a run_config.toml: say which flags and tensors differ."""
    tensors: FlagCreatePairsOff[bool] = False
    """List every tensor, those of the optimizer too."""
    verify: FlagCreatePairsOff[bool] = False
    """Read every file and compare checksums; exit code 1 if anything is damaged."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class ExportFlags:
    """Write the weights of a checkpoint as a Hugging Face folder: safetensors, config.json and, with --hf-base, the
    tokenizer.

    The checkpoint's own configuration describes the model. Flags of a run after a lone -- change it, for example
    -- --hf-config PATH if that file has moved.
    """

    checkpoint: Positional[Annotated[str, arg(metavar="CHECKPOINT")]]
    """Folder of a run's checkpoints (--save), whose latest is taken, or one checkpoint's own folder."""
    out: Positional[Annotated[str, arg(metavar="OUT")]]
    """Folder to write."""
    ckpt_step: Annotated[int | None, arg(metavar="INT")] = None
    """Iteration to take instead of the latest."""
    hf_base: Annotated[str, arg(metavar="PATH")] = ""
    """Folder, or id on the hub, of the Hugging Face model that training started from. Its config.json, tokenizer and
    processor files are copied, and so are tensors that training does not use."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of the weights; auto: as they are in the checkpoint."""
    max_shard_size: Annotated[str, arg(metavar="SIZE")] = "5GB"
    """Largest size of a file: a number of bytes, or a number with KB, MB, GB, KiB, MiB or GiB."""
    force: FlagCreatePairsOff[bool] = False
    """Write into a folder that is not empty; weights in it are replaced."""


@dataclass(frozen=True)
class ImportFlags:
    """Write the weights of a Hugging Face model as a checkpoint that --load takes on any layout.

    Flags of a run after a lone -- set sizes that its config.json does not have.
    """

    hf_path: Positional[Annotated[str, arg(metavar="HF_PATH")]]
    """Folder with config.json and safetensors, or the id of a model on the hub: organisation/name[@revision]."""
    save: Positional[Annotated[str, arg(metavar="SAVE")]]
    """Folder for the checkpoint."""
    model_provider: Annotated[str | None, arg(metavar="NAME")] = None
    """Model family, as for training. Default: the one for the architecture that config.json names."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the parameters: bfloat16 for runs with --bf16, float32 for runs with --no-bf16."""
    allow_difference: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY")] = ()
    """Flag, such as norm-epsilon, whose value may differ from that of config.json; it may be given several times."""


@dataclass(frozen=True)
class PlanFlags:
    """Predict step time and memory of a run on every layout of some GPUs, print the best ones with their flags, and say
    whether separate grids are worth it. Nothing is trained, and no GPU is needed without --measure.

    All other flags are those of train_hetero.py. If they describe a layout of as many GPUs, it is predicted, too.
    """

    gpus: int = 0
    """Number of GPUs."""
    nodes: int = 0
    """Number of nodes, in place of --gpus."""
    gpu: Literal["A100", "H100", "H200", "B200", "GB200"] = "H100"
    """Kind of GPU. Without a profile, costs are estimated from its data sheet."""
    gpu_memory_gib: float | None = None
    """Memory that a process can use on a GPU. Default: that of the kind of GPU."""
    profile: Annotated[str, arg(metavar="FILE")] = ""
    """Measured costs, in a file that --measure has written. They replace the estimates and --gpu."""
    measure: Annotated[str, arg(metavar="FILE")] = ""
    """First measure the passes of a few layers on the GPUs of this host, which takes two to three minutes, and write
    the costs to this file."""
    plan_steps: int = 4
    """Number of steps whose samples are read, at most 4096 of them. Up to 4 steps are simulated; memory is that of the
    fullest of all. A long run on uneven data comes to fuller ones than the default sees."""
    top: int = 10
    """Number of layouts to print."""
    out: Annotated[str, arg(metavar="FILE")] = ""
    """Also write the predictions of all layouts to this file, as JSON. `scripts/report.py --plan FILE` compares a run
    with them."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of text, with every layout."""


@dataclass(frozen=True)
class ConvertDataFlags:
    """Write the samples of --dataset-provider conversations as shards for --dataset-provider energon, which large runs
    read fastest.

    Records that cannot be used are left out and named.
    """

    data: Positional[Annotated[str, arg(metavar="DATA")]]
    """File, folder or YAML file, as for --data-path."""
    out: Positional[Annotated[str, arg(metavar="OUT")]]
    """Folder to write; it must be empty or new."""
    valid_data_path: Annotated[str, arg(metavar="PATH")] = ""
    """Held-out samples. Default: the val split of DATA, if it has one."""
    image_folder: Annotated[str, arg(metavar="PATH")] = ""
    """Folder or URL to which the names of images are relative. Default: the path if it is a folder, or else the folder
    of the file."""
    data_columns: tuple[str, ...] = ()
    """Names of the records' own columns, as for --data-columns of a run."""
    samples_per_shard: int = 1000
    """Largest number of samples in a tar file."""
    max_bad_samples: int = 100
    """Number of records that may be left out. One more ends the command."""


@dataclass(frozen=True)
class AskFlags:
    """Ask a model a question about images and print its answer, as in: mimo ask runs/sft cat.png "What is this?".

    The question is written like the conversations that the model was trained on. vLLM answers where it is installed,
    else the trainer. Flags of a run after a lone -- replace those of the checkpoint, such as -- --tokenizer FOLDER.
    """

    checkpoint: Positional[Annotated[str, arg(metavar="CHECKPOINT")]]
    """Folder of a run's checkpoints (--save), whose latest is taken, one checkpoint's own folder, or a Hugging Face
    folder, such as `mimo export` writes."""
    words: Positional[Annotated[tuple[str, ...], arg(metavar="[IMAGE ...] QUESTION")]]
    """Image files, then the question. <image> in the question stands for an image. Without it, the images come
    first."""
    ckpt_step: Annotated[int | None, arg(metavar="INT")] = None
    """Iteration to take instead of the latest."""
    max_tokens: int = 64
    """Largest number of tokens in the answer."""
    think: bool = False
    """Begin the answer with thoughts, where the chat template does so for answers that have some, as Nemotron 3's does.
    They count towards --max-tokens."""
    engine: Literal["auto", "vllm", "trainer"] = "auto"
    """Program that answers. auto: vLLM where it is installed and knows the model, else the trainer, which is slower."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto: a GPU where there is one."""


Flags = InspectFlags | ExportFlags | ImportFlags | PlanFlags | ConvertDataFlags | AskFlags


COMMANDS: dict[str, Callable[..., Any]] = {"inspect": InspectFlags, "export": ExportFlags, "import": ImportFlags,
                                            "plan": PlanFlags, "convert-data": ConvertDataFlags, "ask": AskFlags}


def parse_command(argv: list[str]) -> tuple[Flags, list[str]]:
    """Parse a command line. Exits after --help, and with code 2 if the line is wrong.

    Returns:
        The flags of the command that was typed, and the words after a lone `--`. For `mimo plan`, the latter also have
        every flag that it does not know.
    """
    own, run_flags = argv, []
    if "--" in argv:
        place = argv.index("--")
        own, run_flags = argv[:place], argv[place + 1:]
    if own[:1] == ["plan"] and not {"-h", "--help"} & set(own):
        flags, unknown = tyro.cli(PlanFlags, prog="mimo plan", args=own[1:], return_unknown_args=True)
        return flags, [*unknown, *run_flags]
    flags = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="mimo", args=own or ["--help"], config=(tyro.conf.OmitArgPrefixes,),
        description="Commands around training: look into a checkpoint, convert checkpoints to and from Hugging Face "
                    "folders, predict which layout is fastest, write files of conversations as shards, and ask a model "
                    "about an image. `mimo COMMAND --help` lists the flags of a command.")
    return flags, run_flags


# Folders that the commands read. They are looked for before torch and Megatron are imported, which takes seconds.


def check_folders(flags: InspectFlags | ExportFlags | ImportFlags | AskFlags) -> None:
    """Raise ValueError if the folder that a command reads does not exist, or holds no checkpoint."""
    if isinstance(flags, ImportFlags):
        pretrained_folder(flags.hf_path)
    elif isinstance(flags, AskFlags):
        check_question(flags)
    else:
        checkpoint_folder(flags.checkpoint, flags.ckpt_step,
                          "mimo inspect" if isinstance(flags, InspectFlags) else "mimo export")
        if isinstance(flags, ExportFlags) and flags.hf_base:
            hub.check_folder("--hf-base", Path(hub.local_folder("--hf-base", flags.hf_base)))


def check_question(flags: AskFlags) -> None:
    """Raise ValueError for `mimo ask` without a model, a question or one of its images."""
    if not is_hf_model(Path(flags.checkpoint)):
        checkpoint_folder(flags.checkpoint, flags.ckpt_step, "mimo ask")
    elif flags.ckpt_step is not None:
        raise ValueError(f"--ckpt-step {flags.ckpt_step}: {flags.checkpoint} is a Hugging Face folder, which has no "
                         "iterations; leave it out, or name a folder of checkpoints")
    if flags.max_tokens < 1:
        raise ValueError(f"--max-tokens {flags.max_tokens}: must be at least 1")
    *images, question = flags.words or ("",)
    if not question.strip():
        raise ValueError('mimo ask: the question is missing; write mimo ask CHECKPOINT [IMAGE ...] "QUESTION"')
    if Path(question).is_file():
        raise ValueError(f"mimo ask: the last word, {question}, is a file; the question comes last, after all images")
    for image in images:
        if not Path(image).is_file():
            raise ValueError(f"mimo ask: there is no image {image}; the question is one word on the command line, so "
                             "put it in quotes")


def is_hf_model(folder: Path) -> bool:
    """Whether a folder is a Hugging Face model: it has config.json and safetensors."""
    return (folder / CONFIG_JSON).is_file() and any(folder.glob("*.safetensors"))


def pretrained_folder(path: str) -> Path:
    """Return the folder of a Hugging Face model, after downloading it if it is on the hub. Raises ValueError."""
    folder = Path(hub.local_folder("mimo import", path))
    hub.check_folder("mimo import", folder)
    hub.download_weights(f"mimo import {path}", folder)
    return folder


def checkpoint_folder(path: str, step: int | None, command: str) -> Path:
    """Find a checkpoint, from a folder of checkpoints or its own folder, at the iteration of `--ckpt-step`.

    Nothing is changed, because a run may be saving there.

    Raises:
        ValueError: there is no such checkpoint.
    """
    root = Path(path)
    found = paths.find(root, step, command, repair=False)
    if found is None:
        raise ValueError(f"{command} {path}: no checkpoint: {_what_is_there(root)}")
    return found


def _what_is_there(folder: Path) -> str:
    """Describe a folder that holds no checkpoint. People often give the folder of a run's records, or of a model."""
    if not folder.is_dir():
        return "there is no such folder"
    if (folder / CONFIG_JSON).is_file():
        return f"this is a Hugging Face folder; mimo import {folder} SAVE makes a checkpoint of it"
    flags = folder / FLAGS
    # A checkpoint that is not complete may have the flags, too, but no metrics.
    if not flags.is_file() or not (folder / METRICS).is_file():
        return f"it has neither {paths.TRACKER} nor {paths.METADATA}"
    save = tomllib.loads(flags.read_text(encoding="utf-8")).get("checkpoint", {}).get("save")
    where = f"its checkpoints are in {save} (--save)" if save else "it saved none; --save FOLDER saves them"
    return f"this is the folder of a run's records (--run-dir), and {where}"


def provider_name(given: str | None, folder: Path) -> str:
    """Return the model provider for importing a folder: the given one, or that of the folder's architecture.

    Raises:
        ValueError: no provider was given and the architecture has none.
    """
    if given is not None:
        return given
    values = read_config_json(folder)
    hint = f"give --model-provider, one of {', '.join(sorted(registry.MODEL_PROVIDERS))} or pkg.module:attr"
    if values is None:
        raise ValueError(f"{folder} has no {CONFIG_JSON}; {hint}")
    name = registry.provider_of_config(values, str(folder / CONFIG_JSON))
    if name is None:
        raise ValueError(f"{folder / CONFIG_JSON} names no architecture; {hint}")
    return name


def takes_hf_config(provider: Any) -> bool:
    """Whether a provider's sizes can come from a Hugging Face config.json (`--hf-config`)."""
    return any(field.name == "hf_config" for field in fields(provider.Config))
