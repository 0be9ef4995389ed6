"""`scripts/data_stats.py`: figures that are known beforehand, a page that shows what the model gets, clear errors."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.stats.collect import Record
from data.stats.figures import pack
from tests.support.report_runs import contents, figures
from tests.support.shards import prepare, write_tar
from tests.support.small_tokenizer import CHATML_TOKENS, write_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "data_stats.py"
PIXELS = np.arange(16 * 32 * 3, dtype=np.uint8).reshape(16, 32, 3)
ANSWER = "a cat & a <b>dog</b>\nna\u00efve \U0001f431"
PAIRS, TEXTS = 12, 5
# Two tiles of 16 x 16 pixels, with patches of 4 pixels and 2 x 2 of them a token: 8 image tokens.
MODEL = ("--model-provider", "mock", "--vision-image-size", "16", "--vision-patch-size", "4",
         "--vision-pixel-shuffle", "2", "--seq-length", "256", "--image-tiling", "fixed", "--prompt-format", "chatml")


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def pair(key: str) -> list[tuple[str, bytes]]:
    messages = [{"role": "user", "content": "<image>what is it?"}, {"role": "assistant", "content": ANSWER}]
    return [(f"{key}.png", png(PIXELS)), (f"{key}.json", json.dumps({"messages": messages}).encode())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A blend of pictures, two of them bad, and of texts; a set without a good sample; a tokenizer."""
    out = tmp_path_factory.mktemp("data_stats")
    good = [part for number in range(PAIRS) for part in pair(f"pair{number:02d}")]
    bad = [("cut.png", png(PIXELS)[:-40]), ("cut.txt", b"a cat"), ("odd.json", b"{")]
    write_tar(out / "pairs" / "train.tar", [*good, *bad])
    write_tar(out / "texts" / "train.tar", [(f"text{number}.txt", b"a blue dog") for number in range(TEXTS)])
    write_tar(out / "broken" / "train.tar", [(f"{number}.json", b"{") for number in range(7)])
    for name in ("pairs", "texts", "broken"):
        prepare(out / name, [("train", "train.*"), ("val", "none")])
    (out / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend_epochized:\n"
        "      - {repetitions: 1, path: ./pairs, subflavors: {kind: chat}}\n"
        "      - {repetitions: 1, path: ./texts}\n"
    )
    write_tokenizer(out / "tokenizer", special=CHATML_TOKENS)
    return out


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], int]:
    spec = importlib.util.spec_from_file_location("data_stats", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    sys.modules["data_stats"] = module  # where its annotations are looked up
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module.main


def line(folder: Path, name: str, *flags: str) -> list[str]:
    return [str(folder / name), "--tokenizer", str(folder / "tokenizer"), "--out", str(folder / f"{name}.html"),
            *MODEL, *flags]


@pytest.fixture(scope="module")
def shown(main, folder) -> str:
    """The page of the blend."""
    assert main(line(folder, "blend.yaml", "--packing-buffer-size", "4", "--packing-balance")) == 0
    return (folder / "blend.yaml.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Open elements, which must close in order; text and class of every token; addresses."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        self.addresses: list[str] = []
        self.count = 0
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [given[name] or "" for name in ("src", "href") if name in given]
        self.count += tag == "article"
        if tag not in self.VOID:
            self.open.append(tag)
            self.classes.append(given.get("class") or "")
            if self.classes[-1].startswith(("token ", "image")) or self.classes[-1] == "token":
                self.tokens.append((self.classes[-1], ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag
        self.classes.pop()

    def handle_data(self, text: str) -> None:
        if self.classes and self.open[-1] == "span" and self.classes[-1].startswith(("token", "image")):
            css, before = self.tokens[-1]
            self.tokens[-1] = (css, before + text)


def test_figures_are_those_of_the_data(main, folder, capsys, shown):
    assert main(line(folder, "blend.yaml", "--packing-buffer-size", "4", "--json")) == 0
    keys: dict[str, Any] = json.loads(capsys.readouterr().out)
    total = PAIRS + TEXTS
    assert keys["samples"] == {"read": total + 2, "good": total, "bad": 2, "distinct": total, "in_one_pass": total + 2}
    assert [(Path(source["path"]).name, source["subflavors"], source["samples"]) for source in keys["sources"]] == [
        ("pairs", {"kind": "chat"}, PAIRS), ("texts", {}, TEXTS)]
    assert keys["tokens"]["image"] == pytest.approx(
        {"min": 0, "median": 8, "mean": 8 * PAIRS / total, "p95": 8, "max": 8})
    assert keys["images"]["count"] == PAIRS
    assert keys["images"]["width"]["median"] == 32 and keys["images"]["height"]["median"] == 16
    assert keys["images"]["tiles"]["mean"] == 2 and keys["images"]["patches"]["mean"] == 32
    assert [packing["buffer_size"] for packing in keys["packing"]["by_buffer_size"]] == [0, 4, 16]
    plain = keys["packing"]["by_buffer_size"][0]
    assert plain["utilisation"] == pytest.approx(keys["tokens"]["total"]["mean"] / 256)
    bad = {entry["key"]: (entry["shard"], entry["reason"]) for entry in keys["bad_samples"]}
    assert set(bad) == {"cut", "odd"}
    assert bad["cut"][0] == bad["odd"][0] == "pairs/train.tar"
    assert "undecodable image" in bad["cut"][1] and "not json" in bad["odd"][1]


def test_page_shows_samples_as_the_model_gets_them(shown):
    page = Page(contents(shown))
    assert page.count == 8
    assert all(address.startswith("data:image/") for address in page.addresses)
    assert "http" not in contents(shown).replace("http-equiv", "") and "url(" not in contents(shown)
    tiles = [np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))
             for address in page.addresses]
    assert len(tiles) % 2 == 0 and len(tiles) >= 2
    assert all(np.array_equal(np.concatenate([left, right], axis=1), PIXELS)
               for left, right in zip(tiles[::2], tiles[1::2], strict=True))


def test_charts_show_every_sample(shown):
    found = figures(shown)
    counts = {title: {name.partition(":")[0]: count for trace in figure["data"] if trace.get("y") and "x" in trace
                      for name, count in zip(trace["hovertext"], trace["y"], strict=True) if count}
              for title, figure in found.items()}
    assert counts["Image tokens"] == {"0": TEXTS, "8": PAIRS}
    assert sum(counts["Length"].values()) == sum(counts["Tokens to learn"].values()) == PAIRS + TEXTS
    assert counts["Width"] == {"32": PAIRS} and counts["Height"] == {"16": PAIRS} and counts["Tiles"] == {"2": PAIRS}
    assert counts["Aspect ratio"] == {"width about 2 times height": PAIRS}
    assert found["Part of a row that holds tokens"]["layout"]["yaxis"]["ticktext"] == [
        "no packing", "<b>buffer of 4</b>", "buffer of 16"]
    assert [trace["name"] for trace in found["Imbalance of the encoder's work"]["data"]] == [
        "packed as they fit", "with --packing-balance"]


def test_page_marks_what_is_learnt(shown):
    samples = [Page(text) for text in re.findall(r'<article class="sample">.*?</article>', shown, re.DOTALL)]
    assert set(re.findall(r"<figcaption><b>(.*?)</b>", shown)) == {"image 1"}
    chats = [sample for sample in samples if any(css == "image" for css, _ in sample.tokens)]
    texts = [sample for sample in samples if sample not in chats]
    assert chats and texts
    for sample in chats:
        learnt = "".join(text for css, text in sample.tokens if "target" in css)
        assert learnt == f"{ANSWER}<|im_end|>"
        assert [text for css, text in sample.tokens if css == "image"] == ["image 1 \u00b7 2 tiles"]
    for sample in texts:
        assert "".join(text for _, text in sample.tokens) == "<s>a blue dog</s>"
        assert "target" not in sample.tokens[0][0]


def test_data_without_a_good_sample_is_shown_too(main, folder, capsys):
    assert main(line(folder, "broken", "--json")) == 0
    keys = json.loads(capsys.readouterr().out)
    assert (keys["samples"]["good"], keys["samples"]["bad"], len(keys["bad_samples"])) == (0, 7, 7)
    assert "not json" in (folder / "broken.html").read_text(encoding="utf-8")


def test_the_model_is_that_of_the_flags_and_files(main, folder, capsys):
    nemotron = folder / "nemotron.toml"
    nemotron.write_text('model-provider = "nemotron-moe-vlm-tiny"\ndataset-provider = "energon"\n'
                        f'data-path = "{folder / "pairs"}"\ntokenizer = "{folder / "tokenizer"}"\n'
                        'prompt-format = "chatml"\nmin-patches = 16\n')
    out = folder / "nemotron.html"
    assert main(["--config", str(nemotron), "--out", str(out), "--max-patches", "256", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    model = keys["model"]
    assert (model["provider"], model["seq_length"]) == ("nemotron-moe-vlm-tiny", 2048)
    assert model["images"].startswith("--image-tiling dynamic --image-resample bicubic --min-patches 16 --max-patches")
    # 16 x 32 pixels, enlarged to 16 patches of 8 pixels at least, 4 of them a token.
    assert keys["images"]["patches"]["max"] == 24 and keys["tokens"]["image"]["max"] == 6
    said = "--model-provider nemotron-moe-vlm-tiny, --image-tiling dynamic"
    assert f"measured for {said}" in out.read_text(encoding="utf-8")
    assert main(line(folder, "pairs")) == 0
    first = capsys.readouterr().out.partition("\n")[0]
    assert first.startswith("model         --model-provider mock, 4 tokens for an image of 16 x 16 pixels, --image-")


def test_a_text_model_takes_no_images(main, folder, capsys):
    arguments = [str(folder / "texts"), "--tokenizer", str(folder / "tokenizer"), "--prompt-format", "chatml",
                 "--out", str(folder / "text.html"), "--model-provider", "causal_lm"]
    assert main(arguments) == 0
    assert "--model-provider causal_lm, no images, rows of 2048 tokens" in capsys.readouterr().out


def record(text_tokens: int, image_tokens: int, encoded_tokens: int | None = None) -> Record:
    encoded = image_tokens if encoded_tokens is None else encoded_tokens
    return Record(("set", ""), "shard key", text_tokens, image_tokens, encoded, 0, ())


def test_packing_counts_full_buffers():
    records = [record(8 - tokens, tokens) for tokens in (8, 0, 8, 0) * 4] + [record(0, 16)]
    packing = pack(records, 4, 16, seed=0)
    assert (packing.buffers, packing.rows, packing.samples_per_row, packing.utilisation) == (4, 8, 2.0, 1.0)
    assert packing.imbalance_balanced == 1.0
    assert packing.imbalance is not None and 1.0 < packing.imbalance <= 2.0
    # The imbalance is that of the encoder's work, which joined tiles do not show.
    tiled = pack([record(4, 4, 30 if index == 1 else 10) for index in range(8)], 4, 16, seed=0)
    assert tiled.imbalance == pytest.approx((40 / 30 + 1) / 2)


def test_files_of_conversations_are_shown_too(main, folder, capsys, tmp_path):
    """The pairs of the shards, in a file with images beside it, and a record without its image."""
    (tmp_path / "0.png").write_bytes(png(PIXELS))
    turns = [{"from": "human", "value": "<image>what is it?"}, {"from": "gpt", "value": ANSWER}]
    lines = [json.dumps({"image": image, "conversations": turns}) for image in (*["0.png"] * PAIRS, "1.png")]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    flags = (*MODEL, "--tokenizer", str(folder / "tokenizer"), "--out", str(tmp_path / "page.html"), "--json")
    assert main([str(tmp_path / "train.jsonl"), "--dataset-provider", "conversations", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main([str(folder / "pairs"), *flags]) == 0
    expected = json.loads(capsys.readouterr().out)
    for part in ("text", "image", "total"):
        assert shown["tokens"][part] == expected["tokens"][part]
    assert (shown["samples"]["good"], shown["samples"]["bad"]) == (PAIRS, 1)
    (bad,) = shown["bad_samples"]
    assert (bad["shard"], bad["key"]) == ("train.jsonl", f"line:{PAIRS + 1}")
    assert "'1.png': there is no file" in bad["reason"]


@pytest.mark.parametrize(("family", "pinpoints", "tokens"), [
    # Of three tiles of 16 tokens; joined, those of the grid have a token at the end of each of their four rows.
    ("llava", "--image-grid-pinpoints", 48), ("llava_next", "--vision-image-grid-pinpoints", 52)])
def test_tiles_of_any_resolution_are_shown(main, folder, capsys, tmp_path, family, pinpoints, tokens):
    sizes = ["--vision-image-size", "16", "--vision-patch-size", "4", "--image-tiling", "anyres", pinpoints, "16x32"]
    page = tmp_path / "page.html"
    assert main([str(folder / "pairs"), "--tokenizer", str(folder / "tokenizer"), "--model-provider", family, *sizes,
                 "--prompt-format", "chatml", "--out", str(page), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tokens"]["image"]["mean"] == tokens
    assert "2 x 1 tiles of 16 x 16 and a thumbnail; " + str(tokens) in page.read_text().replace("\n", "")


@pytest.mark.parametrize(("name", "flags", "message"), [
    ("nowhere", (), "DATASET"),
    ("tokenizer", (), "energon prepare"),
    ("blend.yaml", ("--tokenizer", ""), "--tokenizer"),
    ("blend.yaml", ("--tokenizer", "nowhere"), "--tokenizer nowhere"),
    ("blend.yaml", ("--vision-image-size", "20"), "--vision-image-size 20"),
    ("blend.yaml", ("--seq-length", "4"), "leaves no room in --seq-length 4"),
    ("blend.yaml", ("--packing-balance",), "--packing-balance"),
    ("blend.yaml", ("--samples", "0"), "--samples 0"),
    ("blend.yaml", ("--out", "."), "--out .: is a folder"),
])
def test_errors_are_one_line_with_the_flag(main, folder, capsys, name, flags, message):
    assert main(line(folder, name, *flags)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("data_stats.py: error: ") and output.err.count("\n") == 1
    assert message in output.err
