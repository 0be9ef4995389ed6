"""Functions of the scripts that write shards: tar files of samples, Energon's metadata, a tokenizer of words."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.prompts import IMAGE_MARKER

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}"
    "{% else %}{{ ' ' + message['content'] }}{% endif %}{% endfor %}"
)
# Name and content of a part of a sample.
Member = tuple[str, bytes]


def write_shard(path: Path, members: Iterable[Member]) -> None:
    """Write a tar file whose bytes depend on its members alone."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def prepare_shards(folder: Path, names: Sequence[str], splits: Sequence[str]) -> None:
    """Write the metadata for which `energon prepare` would ask a person.

    Args:
        folder: the folder of the shards.
        names: file names of the shards.
        splits: names of the splits. A shard's name begins with that of its split and a hyphen.
    """
    # Imported here, as tokenizers are below, because torch takes seconds and --help does not need it.
    from megatron.energon import CrudeWebdataset
    from megatron.energon.epathlib import EPath

    with contextlib.redirect_stdout(io.StringIO()):
        CrudeWebdataset.prepare_dataset(
            EPath(folder), list(names), split_parts_patterns=[(split, f"{split}-.*") for split in splits], workers=1
        )
    meta = folder / ".nv-meta"
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    # Energon draws the id at random. Here, the same shards have the same id.
    digest = hashlib.sha256()
    for name in names:
        digest.update((folder / name).read_bytes())
    (meta / "index.uuid").write_text(str(uuid.uuid5(uuid.NAMESPACE_OID, digest.hexdigest())))


def write_word_tokenizer(folder: Path, words: Mapping[str, int], pre_tokenizer: PreTokenizer) -> None:
    """Write a Hugging Face tokenizer with an id for each word.

    Args:
        folder: to write.
        words: ids by word, `<pad>`, `<bos>`, `<eos>` and the image marker among them.
        pre_tokenizer: cuts text into words.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(dict(words)))
    tokenizer.pre_tokenizer = pre_tokenizer
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=[IMAGE_MARKER],
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(folder)
