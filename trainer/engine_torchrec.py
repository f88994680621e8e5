"""The torchrec engine: one step a micro-batch, any module of `model.py`, rows through torchrec and fbgemm.

    slots -> Rows (EmbeddingBagCollection) -> x -> net -> logits = net(x) + wide part -> g = sigmoid(logits) - labels

g is the gradient of the *summed* log-loss: a step is then that of the event engine with the same `micro_batch`, and one
learning rate holds for both. From there, all in place on the memory that the event engine, the publisher and the
checkpoints use: backward updates the rows (fused, row-wise Adagrad), `Wide` its part, `dense_step` the dense weights.

Legend: B rows of a batch, N rows of a micro-batch, C id columns, n network input, P dense weights.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer import model as nets
from trainer.dense import LearnerState
from trainer.engine_event import build_rules
from trainer.event_kernels import Batch
from trainer.events import Features
from trainer.optim import dense_step
from trainer.schema import Schema
from trainer.settings import ModelSettings
from trainer.sharding import Rows
from trainer.tables import Tables
from trainer.wide import Wide, batch_of

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


class TorchrecEngine:
    """Learns in place on the memory of `tables` and `state`; one thread at a time.

    A step costs about 2 ms, whatever its size, before it does anything: the larger the micro-batch, the cheaper an
    event, and the older the weights that predict it.

    Raises:
        SettingsError: a table whose width fbgemm does not do, or an FM or DLRM net over tables of several widths.
    """

    name = "torchrec"

    def __init__(self, schema: Schema, model: ModelSettings, tables: Tables, state: LearnerState) -> None:
        torch.set_num_threads(1)  # in this process; two were up to 5 times slower for nets of this size
        self._rules = build_rules(model)
        self._state = state
        self._wide = Wide(schema, model, tables, state)
        self._net = nets.build(schema, model, state.params)
        self._gradients_P = _collect_gradients(self._net, state.params)
        self._inputs = Inputs(schema, Rows(schema, tables))
        # A net of no terms (logistic regression) reads no rows and, as in the event engine, leaves them as they are.
        self._deep = len(self._gradients_P) > 0 or model.fm

    def learn(
        self, slots_BC: Int64s, features: Features, labels_B: Float32s, *, micro_batch: int | None = None
    ) -> Float32s:
        """Predict and learn `micro_batch` examples at a time (None: all at once); returns the logits made before.

        slots_BC: global slots from `Tables.assign`; -1 reads zeros and learns nothing. A row whose label is NaN (a
        feature event) is passed over, its logit is NaN.
        """
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch: got {micro_batch}, wanted at least 1")
        batch = batch_of(slots_BC, features, labels_B)
        examples = np.flatnonzero(~np.isnan(labels_B))
        size = min(micro_batch or len(examples), len(examples))
        self._wide.begin(batch, size)
        for start in range(0, len(examples), max(size, 1)):
            self._step(examples[start : start + size], batch)
        return batch.logits_B

    def predict(self, slots_BC: Int64s, features: Features) -> Float32s:
        """Logits of B rows; changes nothing."""
        batch = batch_of(slots_BC, features, np.empty(0, np.float32))
        if len(slots_BC):
            with torch.no_grad():
                batch.logits_B[:] = self._logits(np.arange(len(slots_BC)), batch).numpy()
        return batch.logits_B

    @property
    def touched_pairs(self) -> Int64s:
        """Slots of the hashed pairs that the last `learn` changed, each once; valid until the next one."""
        return self._wide.touched_pairs

    def _step(self, rows_N: Int64s, batch: Batch) -> None:
        logits_N = self._logits(rows_N, batch)
        batch.logits_B[rows_N] = logits_N.detach().numpy()
        gradients_N = torch.sigmoid(logits_N.detach()) - torch.from_numpy(batch.labels_B[rows_N])
        if self._deep:
            torch.autograd.backward(logits_N, gradients_N)  # updates the rows, and adds up `_gradients_P`
            self._learn_dense()
        self._wide.learn(rows_N, gradients_N.numpy(), batch)

    def _logits(self, rows_N: Int64s, batch: Batch) -> Tensor:
        wide_N = torch.from_numpy(self._wide.predict(rows_N, batch))
        if not self._deep:
            return wide_N
        logits_N: Tensor = self._net(self._inputs(rows_N, batch), wide_N)
        return logits_N

    def _learn_dense(self) -> None:
        rules, state = self._rules, self._state
        one = np.float32(1)
        dense_step(rules.dense, state.params, state.accumulators, one, self._gradients_P, rules.lr, rules.eps)
        self._gradients_P[:] = 0


class Inputs:
    """The network's input x out of rows and floats, in the order of the schema."""

    def __init__(self, schema: Schema, rows: Rows) -> None:
        self._rows = rows
        self._widths = schema.feature_width_F[rows.feature_order].tolist()
        self._spans = [feature.span for feature in schema.features if not feature.is_id]
        # Where each feature's columns come to lie: first those of the rows, in the order of `rows`, then the floats.
        place = {int(f): k for k, f in enumerate(rows.feature_order)}
        floats = iter(range(len(place), len(schema.features)))
        self._order = [place[f.id_index] if f.is_id else next(floats) for f in schema.features]

    def __call__(self, rows_N: Int64s, batch: Batch) -> Tensor:
        """x [N, n]; its backward updates the embedding rows."""
        pooled_NY = self._rows(self._rows.bags(rows_N, batch.slots_BC, batch.lengths_BF))
        floats_NM = torch.from_numpy(batch.floats_BM[rows_N])
        parts = [*torch.split(pooled_NY, self._widths, 1), *torch.split(floats_NM, self._spans, 1)]
        return torch.cat([parts[k] for k in self._order], 1)


def _collect_gradients(net: nn.Module, params_P: Float32s) -> Float32s:
    """One vector, shaped like the parameters, to which backward adds every gradient: updating is one kernel call."""
    gradients_P = np.zeros_like(params_P)
    for parameter in net.parameters():
        start = (parameter.data_ptr() - params_P.ctypes.data) // params_P.itemsize
        place = gradients_P[start : start + parameter.numel()]
        parameter.grad = torch.from_numpy(place).view_as(parameter)
    return gradients_P
