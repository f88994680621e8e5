"""The embedding tables as torchrec plans and shards them, over the memory of `Tables`.

All tables lie in one `EmbeddingBagCollection` under `DistributedModelParallel` (here a world of one rank, table-wise),
whose fused kernels apply exact row-wise Adagrad. They work on the arrays of `Tables` themselves, so nothing is copied,
and index, publisher, checkpoints and the event engine go on with the arrays they hold.

torchrec and fbgemm are imported here alone. What they do that surprises (tried with torchrec 1.8, fbgemm-gpu 1.8):
- without `compute_kernel="fused"` rows silently do not train on a CPU, hence the check at start;
- an id out of range trains row 0: bounds checks are FATAL, and our own bags are checked as they are filled;
- tables share one fused kernel, whatever their widths, if they have one learning rate and eps and are pooled alike:
  all by sum, with 1 / length as the weight of each id where the mean is wanted.

`rows.py` looks up and learns on this memory; torchrec's own modules (`Sharded.parallel`) do the same.
"""

import atexit
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore  # a store in this process; the usual one listens on a port

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of these libraries, about their own modules
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward as fuse
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim import RowWiseAdagrad

from trainer.errors import LivebedError, SettingsError
from trainer.schema import Schema, Table
from trainer.tables import Tables

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

CPU = torch.device("cpu")
WIDTH_UNIT = 4  # fbgemm's kernels work on vectors of four floats


class Run(NamedTuple):
    """Neighbouring tables of one width and one optimizer, and the memory of the fused kernel that they share."""

    tables: list[Table]
    weights: Tensor
    accumulators: Tensor


class Sharded:
    """The tables under `DistributedModelParallel`, and their memory as planned.

    Raises:
        SettingsError: a table whose width is not a multiple of four.
    """

    def __init__(self, schema: Schema, tables: Tables) -> None:
        for table in schema.tables:
            if table.width % WIDTH_UNIT:
                wanted = f"a multiple of {WIDTH_UNIT}, for the torchrec engine reads rows in vectors of that many"
                raise SettingsError(f"tables.{table.name}.width", got=table.width, wanted=wanted)
        with _rows_kept(tables):
            self.parallel = _distribute(_collection(schema, tables))
        _check(self.parallel, tables)
        self.runs = [Run(run, memory["weights"], memory["momentum1"]) for run, memory in _runs(schema, tables)]


def _name(table: Table) -> str:
    """Names of our own, because ours may hold dots, which modules do not allow."""
    return f"table{table.index}"


def _key(id_feature: int) -> str:
    return f"feature{id_feature}"


class Buffers(dict[str, Tensor]):
    """fbgemm's `preallocated_host_buffers`, equal to itself alone.

    torchrec fuses tables whose options are equal, and hashes the options to find out.
    """

    def __hash__(self) -> int:  # type: ignore[override]  # a plain dict has none
        """By identity."""
        return id(self)

    def __eq__(self, other: object) -> bool:
        """By identity."""
        return self is other


def _runs(schema: Schema, tables: Tables) -> Iterator[tuple[list[Table], Buffers]]:
    """Neighbouring tables of one width and one optimizer, which share a fused kernel; and their memory."""
    for _, group in groupby(schema.tables, key=lambda table: (table.width, table.spec.optimizer)):
        run = list(group)
        first, last = run[0].index, run[-1].index
        slots = slice(tables.slot_base_T[first], tables.slot_base_T[last] + tables.capacity_T[last])
        floats = slice(tables.weight_base_T[first], tables.weight_base_T[last] + tables.rows(last).size)
        weights, accumulators = torch.from_numpy(tables.weights[floats]), torch.from_numpy(tables.accumulators[slots])
        yield run, Buffers(weights=weights, momentum1=accumulators)


def _collection(schema: Schema, tables: Tables) -> EmbeddingBagCollection:
    """The tables, each with the optimizer that backward is to apply and the memory it is to work on."""
    weighted = bool(schema.feature_mean_F.any())
    configs = [
        EmbeddingBagConfig(
            name=_name(table),
            embedding_dim=table.width,
            num_embeddings=table.capacity,
            feature_names=[_key(f) for f in np.flatnonzero(schema.feature_table_F == table.index).tolist()],
            pooling=PoolingType.SUM,
        )
        for table in schema.tables
    ]
    collection = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))
    for run, buffers in _runs(schema, tables):
        options = {"lr": run[0].lr, "eps": run[0].eps, "preallocated_host_buffers": buffers}
        for table in run:
            # torch's own, for torchrec has deprecated its public name for this and calls it in turn.
            fuse(RowWiseAdagrad, collection.embedding_bags[_name(table)].parameters(), options)
    return collection


def _distribute(collection: EmbeddingBagCollection) -> DistributedModelParallel:
    """Place all tables on the one rank, fused."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # it warns of how torchrec calls it
    sharder = EmbeddingBagCollectionSharder(fused_params={"bounds_check_mode": BoundsCheckMode.FATAL})
    plan = construct_module_sharding_plan(
        collection,
        {name: table_wise(rank=0, compute_kernel="fused") for name in collection.embedding_bags},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type=CPU.type,
    )
    return DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(world_of_one()),
        device=CPU,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


@contextmanager
def _rows_kept(tables: Tables) -> Iterator[None]:
    """Bring back what torchrec overwrites when it is built: it gives every table random rows."""
    slots = [tables.occupied(table.index) for table in tables.schema.tables]
    saved = [tables.rows(t)[slots_K].copy() for t, slots_K in enumerate(slots)]
    yield
    tables.weights[:] = 0
    for t, slots_K in enumerate(slots):
        tables.rows(t)[slots_K] = saved[t]


def _check(parallel: DistributedModelParallel, tables: Tables) -> None:
    """Raise if torchrec does not train the memory of `tables`: nothing else would say so."""
    weights, fused = dict(parallel.named_parameters()), parallel.fused_optimizer.state_dict()["state"]
    for table in tables.schema.tables:
        name, slot_base = f"embedding_bags.{_name(table)}.weight", tables.slot_base_T[table.index]
        sums = [shard.tensor for state in fused.get(name, {}).values() for shard in state.local_shards()]
        got = [memory.data_ptr() for memory in (weights[name], *sums)]
        if got != [tables.rows(table.index).ctypes.data, tables.accumulators[slot_base:].ctypes.data]:
            raise LivebedError(f"torchrec does not train table {table.name} in place: its version is not one we know")


def world_of_one() -> dist.ProcessGroup:
    """The process group of this process alone, made on first use; it keeps one loopback socket until exit."""
    if not dist.is_initialized():
        with _gloo_on_loopback():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    group = dist.group.WORLD
    if group is None or group.size() != 1:
        raise LivebedError("this process belongs to a torch.distributed group of several ranks, wanted a process alone")
    return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Gloo listens on the address of the host's name unless told otherwise, and reads that from the environment."""
    variable = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(variable)
    os.environ[variable] = before or next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
