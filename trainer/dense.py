"""The dense weights of the CTR net: one flat float32 vector, so that publishing or saving them is one copy.

n: network input, H: units of a hidden layer, R: rank of a cross layer, D: row width, P: size of the vector.

Order in the vector, which is also the order of `DenseLayout.entries`:

    mlp.<i>.weight (H_i, H_i-1)   mlp.<i>.bias (H_i,)   mlp.head (H_last,)
    cross.<l>.v (R, n)            cross.<l>.u (R, n)    cross.<l>.bias (n,)     cross.head (n,)

Family `dlrm` (torchrec engine only) has instead `bottom.<i>.*` over the floats, `top.<i>.*` and `top.head`.
There is no output bias among them: `LearnerState.offset` holds it together with the running log-odds.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trainer.errors import SettingsError
from trainer.schema import Schema
from trainer.settings import ModelSettings

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Initial = Literal["he", "uniform", "zeros"]

# The bias starts with this much squared gradient, so that its first steps are not of size `bias_lr` whatever happens.
BIAS_INITIAL_ACCUMULATOR = 1.0
POSITIVES, COUNT, BIAS, BIAS_ACCUMULATOR = range(4)


@dataclass(frozen=True)
class Entry:
    """A parameter: its place in the vector, and how it starts: `he` N(0, 2 / fan_in), `uniform` +-1 / sqrt(fan_in)."""

    name: str
    shape: tuple[int, ...]
    start: int
    initial: Initial
    fan_in: int

    @property
    def size(self) -> int:
        """Number of floats."""
        return int(np.prod(self.shape))


class DenseLayout:
    """Names, shapes and places of the dense parameters of a configuration.

    Raises:
        SettingsError: the model asks for features of one width (FM, DLRM) and the tables differ.
    """

    def __init__(self, schema: Schema, model: ModelSettings) -> None:
        if (model.fm or model.family == "dlrm") and len(set(schema.feature_width_F.tolist())) > 1:
            field = "model.family" if model.family == "dlrm" else "model.fm"
            got = sorted(set(schema.feature_width_F.tolist()))
            raise SettingsError(field, got=got, wanted="tables of one width, for it multiplies rows with each other")
        shapes = _dlrm_shapes(schema, model) if model.family == "dlrm" else _ctr_shapes(schema, model)
        entries, start = [], 0
        for name, shape, initial in shapes:
            entries.append(Entry(name, shape, start, initial, fan_in=shape[0] if ".u" in name else shape[-1]))
            start += entries[-1].size
        self.entries = tuple(entries)
        self.size = start

    @cached_property
    def starts(self) -> dict[str, int]:
        """Place of each parameter's first float."""
        return {entry.name: entry.start for entry in self.entries}

    def view(self, flat: Float32s) -> dict[str, Float32s]:
        """Each parameter as an array over the same memory."""
        return {e.name: flat[e.start : e.start + e.size].reshape(e.shape) for e in self.entries}

    def initial(self, seed: int) -> Float32s:
        """Starting values: a function of (seed, name), so that another layer's size does not change them."""
        flat = np.zeros(self.size, np.float32)
        for entry, values in zip(self.entries, self.view(flat).values(), strict=True):
            random = np.random.default_rng([seed, zlib.crc32(entry.name.encode())])
            if entry.initial == "he":
                values[:] = random.standard_normal(entry.shape, np.float32) * np.float32(np.sqrt(2 / entry.fan_in))
            elif entry.initial == "uniform":
                values[:] = (random.random(entry.shape, np.float32) * 2 - 1) / np.float32(np.sqrt(entry.fan_in))
        return flat


def _ctr_shapes(schema: Schema, model: ModelSettings) -> Iterator[tuple[str, tuple[int, ...], Initial]]:
    n = schema.x_width
    if model.hidden:
        yield from _mlp_shapes("mlp", n, list(model.hidden))
        yield "mlp.head", (model.hidden[-1],), "he"
    for layer in range(model.cross_layers):
        yield f"cross.{layer}.v", (model.cross_rank, n), "uniform"
        yield f"cross.{layer}.u", (model.cross_rank, n), "uniform"
        yield f"cross.{layer}.bias", (n,), "zeros"
    if model.cross_layers:
        yield "cross.head", (n,), "uniform"


def _dlrm_shapes(schema: Schema, model: ModelSettings) -> Iterator[tuple[str, tuple[int, ...], Initial]]:
    """Bottom MLP over the floats down to one row, the dot products of all rows, top MLP of `model.hidden`."""
    D, M = int(schema.feature_width_F[0]), schema.num_floats
    rows = len(schema.id_features) + (M > 0)
    if rows < 2:
        raise SettingsError(
            "model.family", got="dlrm", wanted="ctr, or two features at least: dlrm multiplies their rows"
        )
    if M:
        yield from _mlp_shapes("bottom", M, [4 * D, D])
    widths = list(model.hidden)
    inputs = rows * (rows - 1) // 2 + (D if M else 0)
    yield from _mlp_shapes("top", inputs, widths)
    yield "top.head", (widths[-1] if widths else inputs,), "he"


def _mlp_shapes(prefix: str, inputs: int, widths: list[int]) -> Iterator[tuple[str, tuple[int, ...], Initial]]:
    for layer, width in enumerate(widths):
        yield f"{prefix}.{layer}.weight", (width, inputs), "he"
        yield f"{prefix}.{layer}.bias", (width,), "zeros"
        inputs = width


@dataclass(frozen=True)
class LearnerState:
    """All that learning changes besides the tables; every array is updated in place and saved in checkpoints.

    accumulators, moments, powers: of the dense optimizer, see `optim.dense_update`; the last two empty without Adam.
    offset: [positives, count, learned bias, its accumulator], see `offset_logit`.
    pair_z, pair_n: FTRL state of the hashed pairs, 2^pair_bits slots (none without pairs).
    """

    params: Float32s
    accumulators: Float32s
    moments: Float32s
    powers: Float64s
    offset: Float64s
    pair_z: Float32s
    pair_n: Float32s

    @classmethod
    def initial(cls, schema: Schema, model: ModelSettings) -> Self:
        """The state before the first event."""
        layout = DenseLayout(schema, model)
        num_pairs = num_pair_slots(schema, model)
        has_sums, has_moments = model.optimizer.kind == "adagrad", model.optimizer.kind in {"adam", "adamw"}
        return cls(
            params=layout.initial(model.seed),
            accumulators=np.full(layout.size, model.optimizer.initial_accumulator if has_sums else 0, np.float32),
            moments=np.zeros(layout.size if has_moments else 0, np.float32),
            powers=np.ones(2 if has_moments else 0),
            offset=np.array([0, 0, 0, BIAS_INITIAL_ACCUMULATOR], np.float64),
            pair_z=np.zeros(num_pairs, np.float32),
            pair_n=np.zeros(num_pairs, np.float32),
        )

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Everything but the pairs, by name."""
        names = ("params", "accumulators", "moments", "powers", "offset")
        return {name: getattr(self, name) for name in names}

    def live_dense(self) -> Float32s:
        """What serving needs, P + 1 floats: the parameters, and last the offset."""
        return np.append(self.params, offset_logit(self.offset))


def num_pair_slots(schema: Schema, model: ModelSettings) -> int:
    """Slots of the hashed pairs' table: none without pairs."""
    return 2**model.pair_bits if len(schema.pairs_P2) else 0


def offset_logit(offset: Float64s) -> np.float32:
    """What every logit starts from: the running log-odds of the label plus the learned bias."""
    negatives = offset[COUNT] - offset[POSITIVES]
    return np.float32(np.log((offset[POSITIVES] + 1) / (negatives + 1)) + offset[BIAS])
