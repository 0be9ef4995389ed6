"""Build the site of README.md and docs/, with a reference of every flag, and refuse broken links.

    python scripts/build_docs.py [OUT]

OUT is build/site unless it is given. OUT/index.html opens from disk, but browsers allow its search only from a server:
python -m http.server --directory OUT. Nothing is fetched from the network. The reference comes from the dataclasses
that define the flags, so it is never out of date. mkdocs is in the set cpu-dev (./scripts/setup.sh cpu-dev).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo import registry
from mimo.commands.flags import COMMANDS
from mimo.config.cli import FileConfig
from mimo.config.rl_run import RlRunConfig
from mimo.config.toml_file import flag_name
from mimo.config.trainer import RunConfig

ROOT = Path(__file__).resolve().parents[1]
# Pages that are not in docs/: file of the repository -> page of the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
         "scripts/sbatch/README.md": "slurm.md"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
IMAGE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def pages() -> dict[Path, Path]:
    """Return every page: its file in the repository, and its place in the site."""
    found = {ROOT / "docs" / path.name: Path(path.name) for path in sorted((ROOT / "docs").glob("*.md"))}
    return found | {ROOT / source: Path(page) for source, page in PAGES.items()}


def for_site(source: Path, places: Mapping[Path, Path]) -> str:
    """Return a page whose links lead to pages of the site. Links to other files of the repository become their text."""
    text = source.read_text(encoding="utf-8")

    def link(found: re.Match[str]) -> str:
        if "://" in found["target"]:
            return found[0]
        target = (source.parent / found["target"]).resolve()
        if not target.exists():
            raise SystemExit(f"{source.relative_to(ROOT)}: the link to {found['target']} leads nowhere")
        if target not in places:
            return found["text"]
        return f"[{found['text']}]({places[target]}{found['anchor'] or ''})"

    def image(found: re.Match[str]) -> str:
        target = (source.parent / found["target"]).resolve()
        return f"![{found['text']}]({target.relative_to(ROOT / 'docs')})"

    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [IMAGE.sub(image, LINK.sub(link, text[at:fence.start()])), fence[0]]
        at = fence.end()
    return "".join([*parts, IMAGE.sub(image, LINK.sub(link, text[at:]))])


# The reference.


@cache
def helps(section: type) -> dict[str, str]:
    """Return the text below each field of a class, in one line."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(
                    after.value, ast.Constant):
                assert isinstance(statement.target, ast.Name)
                found[statement.target.id] = " ".join(str(after.value.value).split())
    return found


def choices(annotation: Any) -> str:
    """Return the values that a field may have, or their type."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if isinstance(annotation, UnionType):
        return " or ".join(choices(part) for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is tuple:
        return f"{choices(get_args(annotation)[0])} ..."
    return {"str": "text", "int": "integer", "float": "number", "bool": "switch"}.get(
        getattr(annotation, "__name__", ""), "values")


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default in (None, "", ()):
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"`{field.default}`"


def flag_table(section: type, names: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the lines of the table of a section's flags."""
    yield from ("", "| flag | value | default | meaning |", "| --- | --- | --- | --- |")
    hints, texts = get_type_hints(section), helps(section)
    for field in dataclasses.fields(section):
        name = (names or {}).get(field.name, f"`{flag_name(field.name)}`")
        meaning = texts.get(field.name, "").replace("|", "\\|").replace("<", "&lt;")
        yield f"| {name} | {choices(hints[field.name])} | {default_of(field)} | {meaning} |"
    yield ""


def first_line(section: type) -> str:
    return " ".join((section.__doc__ or "").strip().partition("\n\n")[0].split()).replace("<", "&lt;")


def run_reference(title: str, run: type[RunConfig], without: tuple[type, ...] = ()) -> str:
    lines = [f"# {title}", "", "A switch that is on is turned off with `--no-`, as in `--no-bf16`. Keys of "
             "`--config` files are these names without the dashes in front."]
    sections = [FileConfig, *(type(section) for section in vars(run()).values() if section is not None)]
    for section in sections:
        if section not in without:
            name = section.__name__.removesuffix("Config")
            lines += ["", f"## {name}", "", first_line(section), *flag_table(section)]
    return "\n".join(lines)


def provider_reference(title: str, intro: str, providers: Mapping[str, Any]) -> str:
    lines, shown = [f"# {title}", "", intro], dict[type, str]()
    for name, provider in providers.items():
        lines += ["", f"## {name}", ""]
        if provider.Config in shown:
            lines += [f"The flags are those of [{shown[provider.Config]}](#{shown[provider.Config]}).", ""]
            continue
        shown[provider.Config] = name
        lines += [first_line(provider.Config), *flag_table(provider.Config)]
    return "\n".join(lines)


def command_reference() -> str:
    lines = ["# Flags of mimo", "", "`mimo COMMAND --help` prints the same."]
    for name, command in COMMANDS.items():
        words = " ".join(inspect.cleandoc(command.__doc__).split()).replace("<", "&lt;").replace("[", "\\[")
        lines += ["", f"## {name}", "", words, *flag_table(command, {
            field: f"`{field.upper()}`" for field in ("checkpoint", "out", "hf_path", "save", "data", "words")})]
    return "\n".join(lines)


def reference() -> dict[str, str]:
    shared = tuple(type(section) for section in vars(RunConfig()).values() if section is not None)
    rl = run_reference("Flags of train_rl.py", RlRunConfig, (FileConfig, *shared))
    return {
        "train.md": run_reference("Flags of train_hetero.py", RunConfig),
        "rl.md": rl.replace("\n\nA switch", "\n\nBesides these, it takes the sections of [training](train.md) that are "
                                            "not here. A switch", 1),
        "models.md": provider_reference(
            "Flags of models",
            "`--model-provider` names the family, whose flags these are. `--hf-config` fills in most of them.",
            {name: registry.model_provider(name) for name in sorted(registry.MODEL_PROVIDERS)}),
        "data.md": provider_reference(
            "Flags of data",
            "`--dataset-provider` names the data set, whose flags these are. Names with `(prompts)` are those of "
            "`train_rl.py`.",
            {name: registry.dataset_provider(name) for name in sorted(registry.DATASET_PROVIDERS)}
            | {f"{name} (prompts)": registry.prompt_provider(name) for name in sorted(registry.PROMPT_PROVIDERS)}),
        "commands.md": command_reference(),
    }


def build(out: Path) -> int:
    """Build the site and return the exit code of mkdocs, which empties the folder first."""
    is_site = (out / "search" / "search_index.json").is_file()
    if out.exists() and not is_site and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"build_docs.py {out}: it is not empty and not a site of this script; name a new folder")
    work = ROOT / "build" / f"docs-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        shutil.copytree(ROOT / "docs", work / "docs", ignore=shutil.ignore_patterns("*.md", "mkdocs.yml"))
        shutil.copyfile(ROOT / "docs" / "mkdocs.yml", work / "mkdocs.yml")
        places = pages()
        for source, page in places.items():
            (work / "docs" / page).write_text(for_site(source, places), encoding="utf-8")
        (work / "docs" / "reference").mkdir()
        for name, text in reference().items():
            (work / "docs" / "reference" / name).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file",
                   str(work / "mkdocs.yml"), "--site-dir", str(out.resolve())]
        # Material for MkDocs prints an advertisement for its successor otherwise.
        return subprocess.run(command, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "build" / "site",
                        help="folder to write, which is emptied first")
    out = parser.parse_args().out
    if find_spec("mkdocs") is None:
        raise SystemExit("build_docs.py needs mkdocs, which is not installed: run ./scripts/setup.sh cpu-dev first")
    if code := build(out):
        return code
    print(f"{out}/index.html (opens from disk; for its search: python -m http.server --directory {out})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
