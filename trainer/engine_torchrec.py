"""The torchrec engine: one step a micro-batch, any module of `model.py`, rows where torchrec has planned them.

    slots -> Rows -> x -> net -> logits = net(x) + wide part -> g = sigmoid(logits) - labels -> dx -> Rows

g is the gradient of the *summed* log-loss: a step is then that of the event engine with the same `micro_batch`, and one
learning rate holds for both. From there, all in place on the memory that the event engine, the publisher and the
checkpoints use: `Rows` learns from dx (row-wise Adagrad), `Wide` its part, `dense_step` the dense weights. The CTR
family is differentiated by hand (`ctr_gradients.py`), any other net by autograd.

Measured on one core of a server of 2023 (AVX-512), 4 features x 16, MLP 64-32, one cross of rank 8, time on that core,
microseconds a step at batch 16 / 256 / 4,096:

    rows read 28 / 43 / 310   net forward 50 / 105 / 1,400   backward 100 / 215 / 2,700   rows learned 13 / 50 / 500

Autograd, KJT, torchrec's modules and fbgemm's update took 2,000 / 2,400 / 11,500 for the same. What is left at 4,096 is
matrix products (2,300; 1,900 at the 96 GFLOP/s that a product of 64 x 64 reaches) and passes over activations; at 16 it
is the 5 us that each of 25 calls of torch takes.

Legend: B rows of a batch, N rows of a micro-batch, C id columns, n network input, P dense weights.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer import model as nets
from trainer.ctr_gradients import CtrGradients
from trainer.dense import COUNT, LearnerState
from trainer.engine_event import build_rules
from trainer.event_kernels import Batch, rate_now
from trainer.events import Features
from trainer.optim import dense_update
from trainer.rows import Rows
from trainer.schema import Schema
from trainer.settings import ModelSettings
from trainer.tables import Tables
from trainer.wide import Wide, batch_of

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


class TorchrecEngine:
    """Learns in place on the memory of `tables` and `state`; one thread at a time.

    A step costs about 0.2 ms, whatever its size, before it does anything: the larger the micro-batch, the cheaper an
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
        self._gradients_P = np.zeros_like(state.params)
        self._net: AnyNet | CtrGradients
        if model.family == "ctr":
            self._net = CtrGradients(schema, model, state.params, self._gradients_P)
        else:
            self._net = AnyNet(nets.build(schema, model, state.params), state.params, self._gradients_P)
        self._rows = Rows(schema, tables)
        self._longest = 0.0
        # A net of no terms (logistic regression) reads no rows and, as in the event engine, leaves them as they are.
        self._deep = len(state.params) > 0 or model.fm

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
        self._longest = float(np.sqrt(self._rows.take_longest()))
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

    @property
    def max_gradient_norm(self) -> float:
        """Length of the longest gradient of a row in the last `learn`."""
        return self._longest

    def _step(self, rows_N: Int64s, batch: Batch) -> None:
        logits_N = self._logits(rows_N, batch)
        batch.logits_B[rows_N] = logits_N.numpy()
        gradients_N = torch.sigmoid(logits_N) - torch.from_numpy(batch.labels_B[rows_N])
        if self._deep:
            self._rows.learn(self._net.backward(gradients_N))
            self._learn_dense()
        self._wide.learn(rows_N, gradients_N.numpy(), batch)

    def _logits(self, rows_N: Int64s, batch: Batch) -> Tensor:
        wide_N = torch.from_numpy(self._wide.predict(rows_N, batch))
        if not self._deep:
            return wide_N
        return self._net.forward(self._rows(rows_N, batch), wide_N)

    def _learn_dense(self) -> None:
        rules, state = self._rules, self._state
        dense_update(
            rules.dense, state.params, state.accumulators, state.moments, state.powers, self._gradients_P,
            rate_now(float(state.offset[COUNT]), rules.lr, rules.warmup), rules.eps, rules.beta1, rules.beta2,
            rules.weight_decay, rules.clip_squares,
        )  # fmt: skip


class AnyNet:
    """Any net of `model.py`, differentiated by autograd; its parameters' gradients are written to `gradients_P`."""

    def __init__(self, net: nn.Module, params_P: Float32s, gradients_P: Float32s) -> None:
        self._net = net
        self._gradients_P = gradients_P
        _collect_gradients(net, params_P, gradients_P)

    def forward(self, x_Nn: Tensor, wide_N: Tensor) -> Tensor:
        """Logits [N]."""
        self._x_Nn = x_Nn.requires_grad_()
        self._logits_N: Tensor = self._net(self._x_Nn, wide_N)
        logits_N: Tensor = self._logits_N.detach()
        return logits_N

    def backward(self, g_N: Tensor) -> Tensor:
        """Gradient by x of the last `forward`; g_N: of the loss by each logit."""
        self._gradients_P[:] = 0
        torch.autograd.backward(self._logits_N, g_N)
        dx_Nn = self._x_Nn.grad
        if dx_Nn is None:
            return torch.zeros_like(self._x_Nn)
        return dx_Nn


def _collect_gradients(net: nn.Module, params_P: Float32s, gradients_P: Float32s) -> None:
    """Make backward add every gradient to one vector, shaped like the parameters: updating is one kernel call."""
    for parameter in net.parameters():
        start = (parameter.data_ptr() - params_P.ctypes.data) // params_P.itemsize
        place = gradients_P[start : start + parameter.numel()]
        parameter.grad = torch.from_numpy(place).view_as(parameter)
