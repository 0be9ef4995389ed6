"""Compare routed lanes with per-lane loaders: shards opened, bytes read, samples decoded, memory and samples/s.

    python scripts/bench/loader.py --device cpu
    python scripts/bench/loader.py --device cpu --lanes 4 --llm-tp 1 --packing-buffer-size 32
    python scripts/bench/loader.py --device cuda --data-path DATASET --tokenizer FOLDER --image-token-id 32000

One process runs for each rank on this host: an encoder grid of --encoder-dp ranks, and a language grid of --lanes
replicas of --llm-tp times --llm-pp ranks. They train nothing; each takes its microbatches as fast as they come. With
`routed` lanes, one rank reads a lane for all others. With `per-lane` loaders, every rank reads the lanes that it needs.
Both take turns on the same batches, which are compared. Flags that are not listed here go to train_hetero.py.

Opens of shards (tar files without their indices) and the bytes requested from them are counted over all ranks and
their workers, from the opening of the loaders until they are closed. So they include what was read ahead and never
used. `decoded_per_used` is how often a sample that a step used was decoded; samples decoded ahead of the last step
count as `decoded_ahead`. `resident_bytes` is the proportional set size of ranks and workers in the steady state.
samples/s count all lanes in the steps after the first --warmup-steps. Figures are medians over --repeats rounds. The
last line of output is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import hashlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from scripts.bench.harness import argument_parser, as_flags, check_least, device_name, slowest
from scripts.training_runs import torchrun

if TYPE_CHECKING:
    from mimo.config.trainer import RunConfig
    from mimo.data.batch import Microbatch
    from mimo.data.loader import StepLoader
    from mimo.grid.spec import Layout

ARMS = ("routed", "per-lane")
OPENS_PER_SHARD, RATE = 1.1, 1.0
# Patches on a side of an image. Each patch becomes a token.
PATCHES = 8
VOCABULARY = 512
# The id of `<image>` in the tokenizer that comes with drawn images.
IMAGE_TOKEN = 3


def flags() -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's own flags, and those that it passes to the trainer."""
    parser = argument_parser(__doc__, device=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True,
                        help="with cuda, batches are page-locked and a step copies them to the GPU")
    parser.add_argument("--lanes", type=int, default=2, help="replicas of the language model")
    parser.add_argument("--encoder-dp", type=int, default=1, help="encoder ranks, which share the lanes")
    parser.add_argument("--llm-tp", type=int, default=2, help="ranks of a language model's stage")
    parser.add_argument("--llm-pp", type=int, default=1, help="stages of a language model")
    parser.add_argument("--num-workers", type=int, default=2, help="data workers of each lane")
    parser.add_argument("--micro-batch-size", type=int, help="rows of a lane in a step (8; with packing, 1)")
    parser.add_argument("--packing-buffer-size", type=int, default=0,
                        help="samples to choose packs from; 0 for no packing")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=16, help="timed steps")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps before them")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of both arms")
    parser.add_argument("--samples", type=int, default=640, help="samples to write without --data-path")
    parser.add_argument("--shards", type=int, default=126, help="shards to write without --data-path")
    parser.add_argument("--image-size", type=int, default=224, help="pixels on a side of an image, a multiple of 8")
    parser.add_argument("--data-path", help="prepared shards (default: images drawn in a temporary folder)")
    chosen, further = parser.parse_known_args()
    if chosen.micro_batch_size is None:
        chosen.micro_batch_size = 1 if chosen.packing_buffer_size else 8
    if chosen.image_size % PATCHES or not 1 <= chosen.shards <= chosen.samples:
        parser.error(f"--image-size {chosen.image_size} --shards {chosen.shards} --samples {chosen.samples}: need a "
                     f"multiple of {PATCHES}, and 1 <= shards <= samples")
    check_least(parser, chosen, steps=1, warmup_steps=1, repeats=1)
    return chosen, further


def world_size(chosen: argparse.Namespace) -> int:
    return int(chosen.encoder_dp + chosen.lanes * chosen.llm_tp * chosen.llm_pp)


@dataclass
class Visit:
    """One turn of an arm on one rank.

    Attributes:
        keys: sample keys of each step in all batches that this rank holds.
        digests: digests of all tensors of each step before the timed ones.
        first_s: seconds until the first batch, on the slowest rank.
        steady_s: seconds of all timed steps, on the slowest rank.
        resident_bytes: proportional set size of this rank and its workers.
        processes: number of these processes.
        events: records of what these processes read and decoded.
    """

    keys: list[tuple[str, ...]]
    digests: list[str]
    first_s: float
    steady_s: float
    resident_bytes: int
    processes: int
    events: list[str]


def configuration(chosen: argparse.Namespace, further: list[str]) -> tuple[RunConfig, Layout]:
    """Parse and check the flags as train_hetero.py does. This also imports what the loaders need."""
    from mimo.config.cli import parse
    from mimo.config.validate import validate

    options: dict[str, Any] = {
        "layout": "disjoint", "model_provider": "mock", "dataset_provider": "energon", "device": chosen.device,
        "encoder_dp": chosen.encoder_dp, "llm_dp": chosen.lanes, "llm_tp": chosen.llm_tp, "llm_pp": chosen.llm_pp,
        "num_workers": chosen.num_workers, "micro_batch_size": chosen.micro_batch_size,
        "global_batch_size": chosen.micro_batch_size * chosen.lanes, "seq_length": chosen.seq_length,
        "packing_buffer_size": chosen.packing_buffer_size, "vision_image_size": chosen.image_size,
        "vision_patch_size": chosen.image_size // PATCHES, "vocab_size": VOCABULARY, "image_token_id": IMAGE_TOKEN,
        "train_iters": 1000}
    if chosen.data_path:
        options["data_path"] = chosen.data_path
    config = parse([*as_flags(options), *further])
    return config, validate(config, world_size(chosen))


def draw(index: int, size: int) -> tuple[str, bytes]:
    """Draw an image with the smooth areas and grain of a photograph. Returns extension and content of the file."""
    from PIL import Image

    rng = np.random.default_rng(index)
    smooth = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    grain = rng.integers(-8, 9, (size, size, 1))
    image = Image.fromarray(np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8))
    kind = ("JPEG", "jpg") if index % 2 else ("PNG", "png")
    buffer = io.BytesIO()
    image.save(buffer, format=kind[0], compress_level=1)  # JPEG ignores this option
    return kind[1], buffer.getvalue()


def write_shards(folder: Path, *, samples: int, shards: int, image_size: int, rank: int, world_size: int) -> None:
    """Write this process's part of the shards. Each image has a word of text."""
    from data.digits import NAMES
    from data.energon.shards import write_shard
    from data.prompts import IMAGE_MARKER

    def members(indices: Any) -> Iterator[tuple[str, bytes]]:
        for index in indices:
            extension, content = draw(int(index), image_size)
            yield f"{index:06d}.{extension}", content
            messages = [{"role": "user", "content": f"{IMAGE_MARKER} {NAMES[index % 10]}"},
                        {"role": "assistant", "content": str(index % 10)}]
            yield f"{index:06d}.json", json.dumps({"messages": messages}).encode()

    (folder / "shards").mkdir(exist_ok=True)
    split = np.array_split(np.arange(samples), shards)
    for number in range(rank, shards, world_size):
        write_shard(folder / "shards" / f"train-{number:05d}.tar", members(split[number]))


def prepare_images(folder: Path) -> None:
    """Prepare the shards as `energon prepare` does, and write a tokenizer."""
    from data.energon.shards import prepare_shards
    from scripts.prepare_digits import write_tokenizer

    shards = folder / "shards"
    names = sorted(path.name for path in shards.glob("*.tar"))
    prepare_shards(shards, names, ["train"])
    write_tokenizer(folder / "tokenizer")


class Events:
    """A log to which all processes append lines at once, so that killed workers have written everything, too."""

    def __init__(self) -> None:
        self._file = -1

    def record(self, path: Path) -> None:
        """Write to `path` from now on, here and in processes forked from here."""
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, kind: str, value: object) -> None:
        if self._file >= 0:
            os.write(self._file, f"{kind} {value}\n".encode())


def watch(events: Events) -> None:
    """Log every shard that Energon opens, every read from one, and every sample whose images it decodes."""
    from megatron.energon.epathlib import EPath

    from data.energon.task_encoder import EncodedSample, Row, VlmTaskEncoder

    open_file, encode = EPath.open, VlmTaskEncoder.postencode_sample

    @functools.wraps(open_file)
    def noted_open(self: Any, mode: Any = "r", *arguments: Any, **options: Any) -> Any:
        file = open_file(self, mode, *arguments, **options)
        kind = {".tar": "shard", ".idx": "index"}.get(Path(str(self)).suffix)
        if kind is not None and mode == "rb":
            events.note(f"open-{kind}", self)
            read = file.read

            def noted_read(size: int = -1) -> bytes:
                data: bytes = read(size)
                events.note(f"read-{kind}", len(data))
                return data

            file.read = noted_read
        return file

    @functools.wraps(encode)
    def noted_encode(self: VlmTaskEncoder, sample: EncodedSample) -> Row:
        row: Row = encode(self, sample)
        events.note("decode", f"{len(sample.images)} {row.__key__}")
        return row

    EPath.open = noted_open  # type: ignore[method-assign]
    VlmTaskEncoder.postencode_sample = noted_encode


class Bench:
    """The benchmark on one rank."""

    def __init__(self, chosen: argparse.Namespace, further: list[str]) -> None:
        import torch
        import torch.distributed as dist

        self.chosen = chosen
        self.rank = int(os.environ["RANK"])
        self.folder = Path(os.environ["BENCH_FOLDER"])
        self.opened = 0
        self.device = torch.device("cpu")
        if chosen.device == "cuda":
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        dist.init_process_group("gloo")
        # A group for the loaders' messages, apart from the barriers of the main thread.
        self.channel = dist.new_group(backend="gloo")
        if not chosen.data_path:
            further = [*further, "--data-path", str(self.folder / "shards"), "--tokenizer",
                       str(self.folder / "tokenizer")]
            write_shards(self.folder, samples=chosen.samples, shards=chosen.shards, image_size=chosen.image_size,
                         rank=self.rank, world_size=world_size(chosen))
            slowest()
            if self.rank == 0:
                prepare_images(self.folder)
            slowest()
        self.config, self.layout = configuration(chosen, further)
        self.events = Events()
        watch(self.events)

    def open(self, arm: str) -> StepLoader:
        """Open the loader of an arm at the first sample."""
        from mimo import registry
        from mimo.data.loader import open_loader

        config = self.config
        self.opened += 1
        return open_loader(
            self.layout, self.rank, model_provider=registry.model_provider("mock"), model_config=config.model_family,
            data_provider=registry.dataset_provider("energon"), data_config=config.dataset, num_microbatches=1,
            micro_batch_size=config.train.micro_batch_size, seq_length=config.train.seq_length, seed=config.train.seed,
            lane_loader=arm, host=self.channel, tag=self.opened, pin_memory=self.device.type == "cuda")

    def step(self, loader: StepLoader) -> Microbatch:
        """Take the next microbatch as a training step does."""
        import torch

        (batch,) = loader.next_step()
        if self.device.type == "cuda":
            batch = batch.to(self.device)
            torch.cuda.synchronize()
        return batch

    def visit(self, arm: str) -> Visit:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that the last arm freed must not count for this one
        path = self.folder / f"events-{self.opened}-{self.rank}"
        self.events.record(path)
        slowest()
        began = time.perf_counter()
        loader = self.open(arm)
        batches = [self.step(loader)]
        first_s = slowest(time.perf_counter() - began)
        batches += [self.step(loader) for _ in range(self.chosen.warmup_steps - 1)]
        keys, digests = [keys_of(batch) for batch in batches], [digest(batch) for batch in batches]
        del batches
        slowest()
        began = time.perf_counter()
        keys += [keys_of(self.step(loader)) for _ in range(self.chosen.steps)]
        steady_s = slowest(time.perf_counter() - began)
        resident_bytes, processes = resident()
        slowest()
        loader.close()
        slowest()
        found = path.read_text().splitlines()
        path.unlink()
        return Visit(keys, digests, first_s, steady_s, resident_bytes, processes, found)


def keys_of(batch: Microbatch) -> tuple[str, ...]:
    """Sample keys of all that a rank holds of a microbatch. A pack has several samples."""
    rows = (*(batch.text.keys if batch.text else ()), *(key for part in batch.encoders.values() for key in part.keys))
    return tuple(key for row in rows for key in row.split(" "))


def digest(batch: Microbatch) -> str:
    import torch

    from mimo.data.batch import map_tensors

    found = hashlib.sha1()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.cpu().numpy().tobytes())
        return torch.zeros(0)

    found.update(repr(map_tensors(batch, note)).encode())
    return found.hexdigest()


def resident() -> tuple[int, int]:
    """Proportional set size of this process and its workers in bytes (shared pages count once), and their number."""
    import psutil

    here = psutil.Process()
    family = [here, *here.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in family), len(family)


def arm_figures(bench: Bench, visits: list[Visit]) -> dict[str, Any]:
    """Figures of an arm in one round, from the visits of all ranks."""
    language = bench.layout.language
    steps = [[key for lane in range(bench.layout.num_lanes) for key in visits[language.rank_at(dp=lane)].keys[step]]
             for step in range(len(visits[0].keys))]
    used = Counter(key for keys in steps for key in keys)
    noted: dict[str, list[str]] = {}
    for line in (line for visit in visits for line in visit.events):
        kind, value = line.split(" ", 1)
        noted.setdefault(kind, []).append(value)
    decoded = Counter(value.split(" ", 1)[1] for value in noted["decode"])
    opens, distinct = len(noted["open-shard"]), len(set(noted["open-shard"]))
    # A run longer than the data uses keys again. Then a sample decoded ahead may count here, but none is lost.
    decoded_for_used = sum(decoded[key] for key in used)
    timed = sum(map(len, steps[bench.chosen.warmup_steps:]))
    return {
        "shard_opens": opens, "distinct_shards": distinct, "opens_per_shard": opens / distinct,
        "bytes_read": sum(map(int, noted["read-shard"])), "index_opens": len(noted.get("open-index", ())),
        "index_bytes_read": sum(map(int, noted.get("read-index", ()))),
        "samples_used": used.total(), "samples_decoded": decoded.total(),
        "images_decoded": sum(int(value.split(" ", 1)[0]) for value in noted["decode"]),
        "decoded_ahead": decoded.total() - decoded_for_used, "decoded_per_used": decoded_for_used / used.total(),
        "resident_bytes": sum(visit.resident_bytes for visit in visits),
        "processes": sum(visit.processes for visit in visits),
        "samples_per_s": timed / visits[0].steady_s, "first_batch_s": visits[0].first_s}


def middle(values: list[Any]) -> Any:
    """Median of figures. The median of whole numbers is rounded."""
    found = statistics.median(values)
    return round(found) if isinstance(values[0], int) else found


def compare(first: list[Visit], other: list[Visit]) -> None:
    """Raise RuntimeError unless all ranks had the same batches in both arms."""
    for rank, (one, two) in enumerate(zip(first, other, strict=True)):
        if (one.keys, one.digests) != (two.keys, two.digests):
            step = next(step for step, (left, right) in enumerate(zip(one.keys, two.keys, strict=True))
                        if left != right or one.digests[step:step + 1] != two.digests[step:step + 1])
            raise RuntimeError(f"rank {rank}, step {step}: the arms gave different batches: {one.keys[step]} and "
                               f"{two.keys[step]}")


def measure(bench: Bench) -> dict[str, Any] | None:
    """Return all figures on rank 0, and None on other ranks."""
    import torch.distributed as dist

    rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    first: list[Visit] = []
    for _ in range(bench.chosen.repeats):
        for arm in ARMS:
            visits: list[Any] = [None] * bench.layout.world_size
            dist.all_gather_object(visits, bench.visit(arm))
            first = first or visits
            compare(first, visits)
            rounds[arm].append(arm_figures(bench, visits))
    if bench.rank:
        return None
    arms = {arm: {name: middle([figures[name] for figures in found]) for name in found[0]}
            for arm, found in rounds.items()}
    routed, per_lane = arms["routed"], arms["per-lane"]
    ratios = {name: routed[name] / per_lane[name] for name in routed if per_lane[name]}
    worst = max(figures["opens_per_shard"] for figures in rounds["routed"])
    return {
        "device": bench.chosen.device,
        "device_name": device_name(bench.device.type),
        "cpus": os.cpu_count(), "world_size": bench.layout.world_size, "lanes": bench.layout.num_lanes,
        "encoder_dp": bench.chosen.encoder_dp, "num_workers": bench.chosen.num_workers,
        "packing_buffer_size": bench.chosen.packing_buffer_size, "steps": bench.chosen.steps, "equal_batches": True,
        **arms, "routed_over_per_lane": ratios,
        "meets_opens": worst <= OPENS_PER_SHARD,
        "meets_decoded": all(figures["decoded_per_used"] == 1 for figures in rounds["routed"]),
        "meets_samples_per_s": ratios["samples_per_s"] >= RATE, "all": rounds}


def show(figures: dict[str, Any]) -> None:
    print(f"{'':20}{'routed':>14}{'per-lane':>14}{'ratio':>9}")
    for name, ratio in figures["routed_over_per_lane"].items():
        routed, per_lane = (figures[arm][name] for arm in ARMS)
        shown = ".2f" if isinstance(routed, float) else ",d"
        print(f"{name:20}{routed:>14{shown}}{per_lane:>14{shown}}{ratio:>9.2f}")


def main() -> int:
    chosen, further = flags()
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="loader-bench-") as folder:
            return torchrun(__file__, world_size(chosen), sys.argv[1:], BENCH_FOLDER=folder)
    import torch.distributed as dist

    bench = Bench(chosen, further)
    figures = measure(bench)
    dist.destroy_process_group()
    if figures is not None:
        show(figures)
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
