"""`mimo convert-data`: write files of conversations as shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Protocol

from mimo import registry
from mimo.commands.flags import ConvertDataFlags


class ShardWriter(Protocol):
    """A data provider whose samples can be written as shards."""

    Config: ClassVar[type]

    def write_shards(self, config: Any, out: Path, samples_per_shard: int) -> str:
        """Write all splits as shards that --dataset-provider energon reads as the same samples.

        Returns:
            A description of what was written.

        Raises:
            ValueError: the data cannot be read, or more records than `--max-bad-samples` cannot be used.
        """
        ...


def convert_data(flags: ConvertDataFlags) -> int:
    """Run the command. Raises ValueError, with flags and values, if it cannot work."""
    out = Path(flags.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: is not empty; name a new folder")
    for name, least in (("samples_per_shard", 1), ("max_bad_samples", 0)):
        if vars(flags)[name] < least:
            raise ValueError(f"--{name.replace('_', '-')} {vars(flags)[name]}: must be at least {least}")
    provider: ShardWriter = registry.dataset_provider("conversations")
    config = provider.Config(data_path=flags.data, valid_data_path=flags.valid_data_path,
                             image_folder=flags.image_folder, data_columns=flags.data_columns,
                             max_bad_samples=flags.max_bad_samples)
    print(provider.write_shards(config, out, flags.samples_per_shard))
    return 0
