"""Conversations on object stores and web servers, and the cache on the node's disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import yaml

from data.conversation_files import remote
from data.conversation_files.provider import Config, provider
from data.conversation_files.remote import PARTIAL, PARTIAL_S
from tests.support.launch import ROOT
from tests.support.rows import are_same
from tests.support.small_servers import BUCKET, small_store
from tests.unit.data.test_conversation_files import config as local_config
from tests.unit.data.test_conversation_files import greys, read, request, table, write_lines

__all__ = ["local_config"]
config = local_config


@pytest.fixture
def store(tmp_path, config, monkeypatch):
    """A server of `tmp_path/store`, which has a data set with images, as S3, on the web and through MSC."""
    folder = tmp_path / "store"
    (tmp_path / "images").rename(folder.parent / "kept")
    folder.mkdir()
    (tmp_path / "kept").rename(folder / "images")
    (folder / "images" / "0.png").rename(folder / "images" / "a #1.png")
    records = [{"image": "a #1.png", "caption": "zero"}, *({"image": f"{number}.png", "caption": str(number)}
                                                           for number in range(1, 10))]
    write_lines(folder / "train.jsonl", records)
    for name, value in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_REGION", "x")):
        monkeypatch.setenv(name, value)
    settings = {"profiles": {"local": {"storage_provider": {"type": "file", "options": {"base_path": str(folder)}}}}}
    (tmp_path / "msc.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))
    with small_store(folder) as (address, server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of another test's server
        yield address, server


def at(config: Config, base: str, tmp_path: Path, name: str = "train.jsonl", **changes: object) -> Config:
    return replace(config, data_path=f"{base}/{name}", image_folder=f"{base}/images",
                   data_cache=str(tmp_path / "cache"), **changes)


@pytest.mark.parametrize("kind", ["s3", "web", "msc"])
def test_samples_are_those_of_the_local_files(tmp_path, config, store, kind):
    address, server = store
    base = {"s3": f"s3://{BUCKET}", "web": f"{address}/{BUCKET}", "msc": "msc://local"}[kind]
    local = replace(config, data_path=f"{tmp_path}/store/train.jsonl", image_folder=f"{tmp_path}/store/images")
    rows = read(at(config, base, tmp_path), 12)
    assert all(map(are_same, rows, read(local, 12)))
    assert provider.stream_fields(at(config, base, tmp_path)) == provider.stream_fields(local)
    # Each image is read once, by whichever process, and the file of records once.
    assert sorted(set(server.asked)) == sorted(server.asked) and (kind == "msc" or "images/a #1.png" in server.asked)
    before = len(server.asked)
    read(at(config, base, tmp_path), 3)
    assert len(server.asked) == before, "everything is in the cache"
    write_lines(tmp_path / "store" / "train.jsonl", [{"image": "7.png", "caption": "a"}] * 2)
    assert greys(read(at(config, base, tmp_path), 1)[0]) == [7], "a file that has changed is read again"


def test_a_folder_of_a_store_and_a_mix(tmp_path, config, store):
    from pyarrow import parquet

    address, _ = store
    folder = tmp_path / "store" / "hub" / "data"
    folder.mkdir(parents=True)
    for part in range(2):
        parquet.write_table(table(range(part * 4, part * 4 + 4)), folder / f"train-0000{part}-of-00002.parquet")
    (folder / "notes.txt").write_text("")
    there = replace(at(config, f"s3://{BUCKET}", tmp_path, "hub"), shuffle=False)
    here = replace(there, data_path=str(folder.parent))
    assert all(map(are_same, read(there, 8), read(here, 8)))
    with pytest.raises(ValueError, match="a web server does not list folders; name a file"):
        provider.validate(at(config, f"{address}/{BUCKET}", tmp_path, "hub/"), request())
    mix = {"train": [{"path": "train.jsonl", "images": "images", "repetitions": 2}, "hub"]}
    (tmp_path / "store" / "mix.yaml").write_text(yaml.safe_dump(mix))
    mixed = replace(at(config, f"s3://{BUCKET}", tmp_path, "mix.yaml"), image_folder="")
    assert {row.key.partition("/")[0] for row in read(mixed, 60)} == {"train.jsonl", "hub"}


def test_images_come_only_from_the_place_that_is_named(tmp_path, config, store):
    address, server = store
    base = f"{address}/{BUCKET}"
    records = tmp_path / "store" / "own.jsonl"
    write_lines(records, [{"image": f"{base}/images/3.png", "caption": "a"}] * 2)
    assert greys(read(at(config, base, tmp_path, "own.jsonl"), 1)[0]) == [3]
    server.failures = 2
    write_lines(records, [{"image": f"{base}/images/4.png", "caption": "a"}] * 2)
    assert greys(read(at(config, base, tmp_path, "own.jsonl"), 1)[0]) == [4], "a server that fails is asked again"
    for place, message in [
        (f"{address}/other/3.png", "is not below --image-folder http.*/images, the only place"),
        ("../train.jsonl", "is not below --image-folder"), ("s3://bucket/images/3.png", "is not below --image-folder"),
        ("gone.png", r"image 'gone.png': there is no http.*/images/gone.png; names are relative to --image-folder"),
    ]:
        write_lines(records, [{"image": place, "caption": "a"}])
        with pytest.raises(ValueError, match=message):
            provider.validate(at(config, base, tmp_path, "own.jsonl"), request())
    with pytest.raises(ValueError, match=f"--data-path {base}/none.jsonl: does not exist"):
        provider.validate(at(config, base, tmp_path, "none.jsonl"), request())
    with pytest.raises(ValueError, match="--data-cache-gib 0.0: must be above 0"):
        provider.validate(at(config, base, tmp_path, data_cache_gib=0.0), request())
    with pytest.raises(ValueError, match="nowhere://a/b.jsonl: fsspec cannot read it: Protocol not known: nowhere"):
        provider.validate(replace(config, data_path="nowhere://a/b.jsonl"), request())


FILL = """
import sys
from pathlib import Path
from data.conversation_files.remote import Cache
cache = Cache(Path(sys.argv[1]), 20_000)
for number in range(80):
    assert len(cache.image(f"{sys.argv[2]}/{(int(sys.argv[3]) + number) % 60}.bin")) == 1000
"""


def test_many_processes_share_the_cache_within_its_limit(tmp_path):
    (tmp_path / "store").mkdir()
    for number in range(60):
        (tmp_path / "store" / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    images = tmp_path / "cache" / "images"
    (images / "aa").mkdir(parents=True)
    for name, age_s in (("old", PARTIAL_S + 60), ("new", 0)):
        path = images / "aa" / f"{name}{PARTIAL}"
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age_s,) * 2)
    with small_store(tmp_path / "store") as (address, _):
        words = [sys.executable, "-c", FILL, str(tmp_path / "cache"), f"{address}/{BUCKET}"]
        workers = [subprocess.Popen([*words, str(15 * number)], cwd=ROOT) for number in range(4)]
        while len(list(images.rglob("*"))) < 20:
            assert any(worker.poll() is None for worker in workers)
            time.sleep(0.01)
        workers[0].kill()  # anywhere: the others go on
        assert [worker.wait() for worker in workers[1:]] == [0, 0, 0] and workers[0].wait() in (0, -signal.SIGKILL)
        assert subprocess.run([*words, "0"], cwd=ROOT, check=False).returncode == 0
    files = [path for path in images.rglob("*") if path.is_file() and not path.name.endswith(PARTIAL)]
    assert sum(path.stat().st_size for path in files) <= 20_000 + 1000
    assert all(len(set(path.read_bytes())) == 1 and path.stat().st_size == 1000 for path in files)
    assert not (images / "aa" / f"old{PARTIAL}").exists() and (images / "aa" / f"new{PARTIAL}").exists()


def test_columns_of_other_names_are_read(tmp_path, config):
    records = [{"prompt": "what?", "response": str(number), "img": f"{number}.png", "messages": "notes"}
               for number in range(4)]
    write_lines(tmp_path / "train.jsonl", records)
    named = replace(config, shuffle=False, data_columns=("question=prompt", "answer=response,image=img"))
    same_records = [{"question": record["prompt"], "answer": record["response"], "image": record["img"]}
                    for record in records]
    other = replace(config, shuffle=False, data_path=str(write_lines(tmp_path / "plain.jsonl", same_records)))
    rows = read(named, 4)
    assert all(map(are_same, rows, read(other, 4))) and [greys(row) for row in rows] == [[0], [1], [2], [3]]
    assert provider.stream_fields(named)["data_path"] != provider.stream_fields(
        replace(named, data_columns=("question=prompt", "answer=response")))["data_path"]
    entry = {"path": "train.jsonl", "columns": {"question": "prompt", "answer": "response", "image": "img"}}
    (tmp_path / "mix.yaml").write_text(json.dumps({"train": [entry]}))
    assert all(map(are_same, rows, read(replace(config, shuffle=False, data_path=f"{tmp_path}/mix.yaml"), 4)))
    for columns, message in [
        (("question=prompt", "image=imgs"), "--data-columns image=imgs: none of the first 4 records has the column"),
        (("query=prompt",), "--data-columns: unknown key query; known are messages, conversations"),
        (("question",), "--data-columns question: expected KEY=COLUMN, each key once"),
    ]:
        with pytest.raises(ValueError, match=message):
            provider.validate(replace(config, data_columns=columns), request())


@pytest.mark.parametrize("record", [
    {"question": "where?", "answer": "there", "bbox": [1, 2, 3, 4]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<bbox>"}],
     "objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}},
])
def test_bounding_boxes_are_refused_by_name(tmp_path, config, record):
    write_lines(tmp_path / "train.jsonl", [record])
    with pytest.raises(ValueError, match=r"line:1: (bbox|objects) .*: bounding boxes are not read; write them into"):
        provider.validate(config, request())


def test_the_cache_has_a_place_of_its_own(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert remote.default_cache() == Path("/somewhere/mimo-hetero")
