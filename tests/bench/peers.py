"""The learners that `tests.bench.training` measures beside Livebed, each from the raw log to its last update.

Each predicts before it learns. One thread each, whose time on a core counts, so that other work on the machine does
not; but Vowpal Wabbit reading a file parses in a second thread, so for it the clock counts, or both threads' time where
that is less. What a peer builds before it sees the log (tables, network) is not counted, as it is not for Livebed.
"""

import math
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from river import facto, optim
from torch import Tensor, nn
from vowpalwabbit import Workspace

from tests.bench.kuairand import CONFIGURATION, IMPRESSIONS, MS_PER_HOUR, raw_rows
from trainer.events import Features, derive
from trainer.metrics import summary
from trainer.schema import Schema
from trainer.settings import ModelSettings, Settings
from trainer.table_file import chunks, read_table

Float32s = npt.NDArray[np.float32]

LABEL, TIME = "is_click", "time_ms"
NAMESPACES = "abcd"  # user, video, hour, duration
HASH_BITS = 18  # rows of PyTorch's table; 10,057 ids of this log come in all
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Run(NamedTuple):
    """One pass over the log."""

    labels_B: Float32s
    logits_B: Float32s  # each made before its event was learned
    seconds: float  # on a core

    @property
    def events_per_s(self) -> float:
        """From the raw file to the last update."""
        return len(self.labels_B) / self.seconds

    @property
    def logloss(self) -> float:
        """Of the predictions made before learning."""
        return float(summary(self.labels_B, self.logits_B).logloss)


def read(schema: Schema, max_rows: int | None) -> Iterator[tuple[Features, Float32s, npt.NDArray[np.int64]]]:
    """Raw file -> hashed features, labels, times: Livebed's own reader, the fastest at hand, lent to PyTorch too."""
    table = read_table(IMPRESSIONS, time=TIME, max_rows=max_rows)
    for chunk in chunks(schema, table, label=LABEL, time=TIME):
        yield derive(schema, chunk.inputs, chunk.time_ms_B), chunk.labels_B, chunk.time_ms_B


class Dcn(nn.Module):
    """The net of the configuration in plain PyTorch: low-rank DCN-V2 and an MLP over rows of one sparse table."""

    def __init__(self, num_features: int, width: int, model: ModelSettings) -> None:
        super().__init__()
        n = num_features * width
        self.rows = nn.Embedding(2**HASH_BITS, width, sparse=True)
        nn.init.normal_(self.rows.weight, std=0.05)
        sizes = [n, *model.hidden]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self.v = nn.ModuleList(nn.Linear(n, model.cross_rank, bias=False) for _ in range(model.cross_layers))
        self.u = nn.ModuleList(nn.Linear(model.cross_rank, n) for _ in range(model.cross_layers))
        self.head = nn.Linear(n, 1, bias=False)

    def forward(self, ids_BF: Tensor) -> Tensor:
        """Logits [B]."""
        x = xl = self.rows(ids_BF).flatten(1)
        for v, u in zip(self.v, self.u, strict=True):
            xl = x * u(v(xl)) + xl
        logits_B: Tensor = (self.mlp(x) + self.head(xl)).squeeze(1)
        return logits_B

    def dense(self) -> list[nn.Parameter]:
        """All but the rows."""
        return [parameter for parameter in self.parameters() if parameter is not self.rows.weight]


# Of Adam (0.001, 0.003) and Adagrad (0.02, 0.05) for the net, and of 0.05, 0.1 and 0.2 for the rows, these had the
# lowest logloss over the three batches on this log. Fused Adagrad is also faster than fused Adam at 16, as fast above.
ROW_LR, DENSE_LR = 0.2, 0.02


def pytorch(batch: int, max_rows: int | None) -> Run:
    """Plain PyTorch, a step a batch: sparse Adagrad for the rows, fused Adagrad for the net."""
    warnings.filterwarnings("ignore", "Sparse invariant checks")  # of Adagrad's own code
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = Settings.load(CONFIGURATION, environment={})
    schema = Schema.from_settings(settings)
    net = Dcn(len(schema.id_features), schema.tables[0].width, settings.model)
    sparse = torch.optim.Adagrad([net.rows.weight], lr=ROW_LR)
    dense = torch.optim.Adagrad(net.dense(), lr=DENSE_LR, fused=True)
    salt_F = np.arange(len(schema.id_features), dtype=np.uint64) * GOLDEN
    labels, logits = [], []
    started = time.thread_time()
    for features, labels_B, _ in read(schema, max_rows):
        mixed_BF = (features.ids_BC.view(np.uint64) + salt_F) * GOLDEN
        ids_BF, y_B = (
            torch.from_numpy((mixed_BF >> np.uint64(64 - HASH_BITS)).view(np.int64)),
            torch.from_numpy(labels_B),
        )
        for i in range(0, len(labels_B), batch):
            logits_N = net(ids_BF[i : i + batch])
            logits.append(logits_N.detach())
            loss = nn.functional.binary_cross_entropy_with_logits(logits_N, y_B[i : i + batch])
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
        labels.append(labels_B)
    seconds = time.thread_time() - started
    return Run(np.concatenate(labels), torch.cat(logits).numpy(), seconds)


def vw_line(row: dict[str, Any]) -> str:
    """One impression as Vowpal Wabbit reads it."""
    hour, duration = row["time_ms"] // MS_PER_HOUR % 24, round(math.log2(max(row["duration_ms"], 1)))
    label = 1 if row[LABEL] else -1
    return f"{label} |a {row['user_id']} |b {row['video_id']} |c {hour} |d {duration}"


def vw_arguments() -> str:
    """Logistic regression with all pairs."""
    pairs = " ".join(f"-q {a}{b}" for i, a in enumerate(NAMESPACES) for b in NAMESPACES[i + 1 :])
    return f"--loss_function logistic -b 22 --quiet {pairs}"


def vw_python(max_rows: int | None) -> Run:
    """Vowpal Wabbit with pairs, line by line through its Python parser."""
    workspace = Workspace(vw_arguments())
    labels, logits = [], []
    started = time.thread_time()
    for row in raw_rows()[:max_rows]:
        example = workspace.parse(vw_line(row))
        workspace.learn(example)  # predicts first: the kept prediction is the one made before the update
        logits.append(example.get_simplelabel_prediction())
        labels.append(row[LABEL])
        workspace.finish_example(example)
    seconds = time.thread_time() - started
    workspace.finish()
    return Run(np.array(labels, np.float32), np.array(logits, np.float32), seconds)


def vw_file(max_rows: int | None) -> Run:
    """Vowpal Wabbit with pairs over a file in its own text format, which is not counted to be written."""
    rows = raw_rows()[:max_rows]
    with tempfile.TemporaryDirectory() as directory:
        log, predictions = Path(directory, "log.txt"), Path(directory, "predictions.txt")
        log.write_text("".join(f"{vw_line(row)}\n" for row in rows))
        started, started_cpu = time.perf_counter(), time.process_time()
        Workspace(f"{vw_arguments()} -d {log} -p {predictions}").finish()
        seconds = min(time.perf_counter() - started, time.process_time() - started_cpu)
        logits = np.loadtxt(predictions, np.float32)
    return Run(np.array([row[LABEL] for row in rows], np.float32), logits, seconds)


def river_fm(max_rows: int | None) -> Run:
    """River's factorization machine, event by event."""
    model = facto.FMClassifier(
        n_factors=8,
        weight_optimizer=optim.AdaGrad(0.1),
        latent_optimizer=optim.AdaGrad(0.05),
        latent_initializer=optim.initializers.Normal(mu=0.0, sigma=0.05, seed=7),
    )
    labels, probabilities = [], []
    started = time.thread_time()
    for row in raw_rows()[:max_rows]:
        x = dict.fromkeys(vw_line(row).split(" |")[1:], 1.0)
        probabilities.append(model.predict_proba_one(x).get(True, 0.5))
        model.learn_one(x, bool(row[LABEL]))
        labels.append(row[LABEL])
    seconds = time.thread_time() - started
    p = np.clip(np.array(probabilities), 1e-6, 1 - 1e-6)
    return Run(np.array(labels, np.float32), np.log(p / (1 - p)).astype(np.float32), seconds)
