"""Scores of nets that the numba kernels do not know (family `dlrm`): rows as in `Scorer`, forward pass in torch.

Importing this imports torch (2 s, 220 MiB): only where such a model is configured.

Legend: B rows (candidates), M float columns, n network input.
"""

import numpy as np

from trainer.engine_event import plain
from trainer.events import Features
from trainer.live import Reader
from trainer.schema import Schema
from trainer.scorer import Scored, Scorer
from trainer.settings import ModelSettings
from trainer.torch_net import TorchNet
from trainer.wide import without_net


class TorchScorer(Scorer):
    """Same use and same answers as `Scorer`, for every family. Logits of a row may differ by 1e-6 with its company."""

    def __init__(self, schema: Schema, model: ModelSettings, reader: Reader) -> None:
        super().__init__(schema, without_net(model), reader)
        self._torch_net = TorchNet(schema, model)
        self._dense_version: int | None = None

    def score(self, features: Features) -> Scored:
        """Probabilities of B rows, whose entity state has been filled in. Creates and learns nothing."""
        offset = self._load_dense()
        ids_BC, lengths_BF = plain(features.ids_BC), plain(features.lengths_BF)
        B = len(ids_BC)
        x_Bn, wide_B = np.zeros((B, self._x_width), np.float32), np.full(B, offset, np.float32)
        status_BC = np.zeros(ids_BC.shape, np.uint8)
        self._gather(ids_BC, lengths_BF, x_Bn, wide_B, status_BC)
        if len(self._pairs_P2):
            self._add_pairs(ids_BC, wide_B)
        x_Bn[:, self._float_x_M] = features.floats_BM
        logits_B = self._torch_net.logits(x_Bn, wide_B) if B else wide_B
        probabilities_B = (1 / (1 + np.exp(-logits_B.astype(np.float64)))).astype(np.float32)
        return Scored(probabilities_B, logits_B, status_BC)

    def _load_dense(self) -> np.float32:
        """Take over newer dense weights, if there are any; returns the offset, which is the last of them."""
        dense, dense_version = self._reader.dense()
        if dense_version != self._dense_version:
            self._torch_net.load(dense[:-1])
            self._dense_version = dense_version
        offset: np.float32 = dense[-1]
        return offset
