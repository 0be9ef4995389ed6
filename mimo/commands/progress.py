"""A progress bar over tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from mimo.weights.writer import Progress


@contextmanager
def tensor_bar(title: str) -> Iterator[Progress]:
    """A callback that moves a bar on standard error; no bar where that is no terminal."""
    with tqdm(desc=title, unit=" tensors", disable=None, dynamic_ncols=True) as bar:

        def advance(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.set_postfix_str(name[-48:], refresh=False)
            bar.update(done - bar.n)

        yield advance
