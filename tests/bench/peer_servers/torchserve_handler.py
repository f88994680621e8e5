"""What TorchServe runs in its worker: the body is JSON already, one request a batch."""

from pathlib import Path
from typing import Any

from frozen import FrozenModel  # packed beside this file


class Handler:
    """TorchServe's contract of a class: `initialize`, then `handle` for each batch."""

    def initialize(self, context: Any) -> None:
        """Load what the archive holds."""
        self._model = FrozenModel.of_dicts(Path(context.system_properties["model_dir"]))

    def handle(self, batch: list[dict[str, Any]], context: Any) -> list[dict[str, Any]]:
        """Score each request of a batch."""
        return [{"scores": self._model.score(self._model.encode(one["body"]["candidates"])).tolist()} for one in batch]
