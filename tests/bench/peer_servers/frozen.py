"""A trained DCN-V2 taken out of Livebed, frozen, for the peers: the same rows and weights, in plain torch.

A directory holds `weights.npz` (no pickle) and `vocabulary.json`. What a careful server of a frozen model does: a dict
from raw value to row instead of a hash, one arena for all rows and one gather for all ids of a request, a traced and
frozen net, one thread, inference mode. Needs torch and numpy only, nothing of Livebed: TorchServe packs this one file.

Legend: B candidates, F features, D row width, N rows of the arena (0: unknown, zeros), n = F * D.
"""

import json
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WEIGHTS, VOCABULARY = "weights.npz", "vocabulary.json"


class Vocabulary(dict[int, int]):
    """Raw value -> row; what is not in it reads row 0."""

    def __missing__(self, value: int) -> int:
        return 0


class DcnV2(nn.Module):
    """Two ReLU layers beside low-rank cross layers, over the concatenated rows."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, values in weights.items():
            self.register_buffer(name.replace(".", "_"), values)
        self._num_layers = sum(name.startswith("mlp.") and name.endswith(".weight") for name in weights)
        self._num_crosses = sum(name.startswith("cross.") and name.endswith(".v") for name in weights)

    def forward(self, rows_FB: Tensor) -> Tensor:
        """Indices into the arena -> probabilities of B."""
        num_features, num_rows = rows_FB.shape
        x = self.arena.index_select(0, rows_FB.T.reshape(-1)).view(num_rows, num_features * self.arena.shape[1])
        h = x
        for i in range(self._num_layers):
            h = torch.relu(
                nn.functional.linear(h, self.get_buffer(f"mlp_{i}_weight"), self.get_buffer(f"mlp_{i}_bias"))
            )
        logits_B = h @ self.mlp_head
        crossed = x
        for i in range(self._num_crosses):
            v, u = self.get_buffer(f"cross_{i}_v"), self.get_buffer(f"cross_{i}_u")
            inner = nn.functional.linear(crossed, v)
            crossed = x * nn.functional.linear(inner, u.T, self.get_buffer(f"cross_{i}_bias")) + crossed
        return torch.sigmoid(logits_B + crossed @ self.cross_head + self.offset)


class FrozenModel:
    """Scores rows; `read` picks a feature out of a row (`itemgetter` of dicts, `attrgetter` of structs)."""

    def __init__(self, directory: Path, read: Callable[[str], Callable[[Any], int]]) -> None:
        torch.set_num_threads(1)  # nets of this size only lose by more, and the cores are shared
        vocabulary = json.loads((directory / VOCABULARY).read_text())
        self.features: list[str] = vocabulary["features"]
        self._columns = [
            (read(name), Vocabulary({int(value): row for value, row in vocabulary["rows"][name].items()}).__getitem__)
            for name in self.features
        ]
        with np.load(directory / WEIGHTS, allow_pickle=False) as arrays:
            net = DcnV2({name: torch.from_numpy(arrays[name]) for name in arrays.files}).eval()
        with torch.inference_mode():
            example = torch.zeros((len(self.features), 100), dtype=torch.int64)
            self._net = torch.jit.freeze(torch.jit.trace(net, example, check_trace=False))
            for count in (1, 100, 1000):  # what the tracing executor compiles, it compiles on its first two calls
                for _ in range(3):
                    self._net(torch.zeros((len(self.features), count), dtype=torch.int64))

    @classmethod
    def of_dicts(cls, directory: Path) -> "FrozenModel":
        """For rows that are dicts."""
        return cls(directory, itemgetter)

    @classmethod
    def of_structs(cls, directory: Path) -> "FrozenModel":
        """For rows that are structs."""
        return cls(directory, attrgetter)

    def encode(self, rows: Sequence[Any]) -> Tensor:
        """Rows -> indices into the arena."""
        rows_FB = [list(map(find, map(read, rows))) for read, find in self._columns]
        return torch.from_numpy(np.array(rows_FB, np.int64))

    def score(self, rows_FB: Tensor) -> np.ndarray[Any, Any]:
        """Probabilities of B."""
        with torch.inference_mode():
            probabilities: np.ndarray[Any, Any] = self._net(rows_FB).numpy()
        return probabilities
