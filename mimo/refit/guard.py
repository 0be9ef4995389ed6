"""An engine that has only some of the new weights serves nobody."""

from __future__ import annotations

from typing import Any

import torch

from mimo.refit.meeting import RefitError


class Guard:
    """Stands in a worker's model, before the logits: they are what every generated token needs.

    Args:
        model: the worker's. Its `compute_logits` runs outside of CUDA graphs, in every step.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._armed = False
        self._complete = True
        self._received = False

    def arm(self, complete: bool) -> None:
        """Stand guard from now on, for good.

        Args:
            complete: whether the model has weights that may be served. Only the first word counts: after that, what
                updates have come in.
        """
        if self._armed:
            return
        self._armed, self._complete = True, complete
        compute_logits = self._model.compute_logits

        def guarded(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            self.check()
            logits: torch.Tensor | None = compute_logits(*args, **kwargs)
            return logits

        self._model.compute_logits = guarded

    def check(self) -> None:
        """Raise RefitError where the weights are not whole."""
        if not self._complete:
            raise RefitError("this engine has no complete weights: no refit has succeeded since it started, or the "
                             "last one failed; it generates again after one that does")

    def close(self) -> None:
        """Serve nothing."""
        self._complete = self._received = False

    def received(self) -> None:
        """All weights have come in."""
        self._received = True

    def open(self) -> None:
        """Serve again. Raises RefitError where not all weights have come in."""
        if not self._received:
            raise RefitError("the weight update ends without all of its weights; this engine goes on refusing to "
                             "generate")
        self._complete = True
