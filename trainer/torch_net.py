"""A net of `model.py` as numpy in, numpy out, on dense weights of its own: for scoring where no engine runs."""

import numpy as np
import numpy.typing as npt
import torch

from trainer import model as nets
from trainer.dense import DenseLayout
from trainer.schema import Schema
from trainer.settings import ModelSettings

Float32s = npt.NDArray[np.float32]


class TorchNet:
    """The configured net; its weights are zeros until `load`. Makes torch use one thread in this process."""

    def __init__(self, schema: Schema, model: ModelSettings) -> None:
        torch.set_num_threads(1)  # nets as small as ours only lose by more (up to 5x), and other workers want the cores
        self._params_P = np.zeros(DenseLayout(schema, model).size, np.float32)
        self._net = nets.build(schema, model, self._params_P)

    def load(self, params_P: Float32s) -> None:
        """Take over these weights, by copying."""
        self._params_P[:] = params_P

    def logits(self, x_Bn: Float32s, wide_B: Float32s) -> Float32s:
        """Logits of B rows, B > 0; `wide_B` is added as it is."""
        with torch.no_grad():
            logits_B: Float32s = self._net(torch.from_numpy(x_Bn), torch.from_numpy(wide_B)).numpy()
        return logits_B
