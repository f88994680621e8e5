"""Embedding rows through torchrec and fbgemm, over the memory of `Tables`: lookup, backward and update fused.

All tables lie in one `EmbeddingBagCollection` under `DistributedModelParallel` (here a world of one rank, table-wise),
whose fused kernel applies exact row-wise Adagrad during backward. After it is built, fbgemm's weights and optimizer
state are laid over the arrays of `Tables`: nothing is copied, and index, publisher, checkpoints and the event engine
go on with the arrays they hold. torchrec's own state dicts still show the storage it started with: do not read them.

torchrec and fbgemm are imported here alone. What they do that surprises (tried with torchrec 1.8, fbgemm-gpu 1.8):
- without `compute_kernel="fused"` rows silently do not train on a CPU, hence the check at start;
- an id out of range trains row 0, hence FATAL bounds checks, and `-1` never gets this far;
- all tables of one learning rate and eps share one fused kernel, whatever their widths, if pooled alike: by sum,
  with 1 / length as the weight of each id where the mean is wanted.

Legend: N rows (examples), F id features, T tables, J ids of all bags end to end, Y width of all pooled rows together.
"""
# ruff: noqa: PLR0917 -- kernels take arrays one by one: numba unpacks no objects.

import atexit
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim import RowWiseAdagrad

from trainer.errors import LivebedError, SettingsError
from trainer.kernel import kernel
from trainer.schema import Schema, Table
from trainer.tables import Tables

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

CPU = torch.device("cpu")
WIDTH_UNIT = 4  # fbgemm's kernels work on vectors of four floats


class Bags(NamedTuple):
    """Ids to look up, bag by bag: all rows of the first feature of `Rows.feature_order`, then the next feature's.

    slots_J: table-local; weights_J: what each row is multiplied with, None for 1.
    """

    slots_J: Int64s
    lengths_FN: Int64s
    weights_J: Float32s | None


@kernel
def fill_bags(
    rows_N: Int64s,
    slots_BC: Int64s,
    lengths_BF: npt.NDArray[np.int32],
    plan_F5: Int64s,
    slots_J: Int64s,
    lengths_FN: Int64s,
    weights_J: Float32s,
) -> int:
    """Fill the arrays of `Bags`; returns J. plan_F5, see `Rows`; an empty weights_J stays so."""
    at = 0
    for k in range(plan_F5.shape[0]):
        f, first, is_list, takes_mean, base = plan_F5[k]
        for i in range(rows_N.shape[0]):
            b, bag_start = rows_N[i], at
            length = np.int64(lengths_BF[b, f]) if is_list else 1
            for slot in slots_BC[b, first : first + length]:
                if slot < 0:
                    continue
                slots_J[at] = slot - base
                if weights_J.shape[0] > 0:
                    weights_J[at] = np.float32(1) / np.float32(length) if takes_mean else np.float32(1)
                at += 1
            lengths_FN[k, i] = at - bag_start
    return at


class Rows:
    """Pooled rows of bags; calling it builds the graph whose backward updates rows and accumulators in place.

    Raises:
        SettingsError: a table whose width is not a multiple of four.
    """

    def __init__(self, schema: Schema, tables: Tables) -> None:
        for table in schema.tables:
            if table.width % WIDTH_UNIT:
                wanted = f"a multiple of {WIDTH_UNIT}, for the torchrec engine reads rows in vectors of that many"
                raise SettingsError(f"tables.{table.name}.width", got=table.width, wanted=wanted)
        # torchrec gives its answers in the order of the tables.
        self.feature_order = np.argsort(schema.feature_table_F, kind="stable")
        self.weighted = bool(schema.feature_mean_F.any())
        table_F = schema.feature_table_F
        columns = (schema.feature_column_F, schema.feature_list_F, schema.feature_mean_F, tables.slot_base_T[table_F])
        # Id feature, its first column, whether it is a list, whether it takes the mean, where its table's slots start.
        self._plan_F5 = np.stack([self.feature_order, *(column[self.feature_order] for column in columns)], axis=1)
        self._keys = [_key(f) for f in self.feature_order.tolist()]
        self._parallel = _distribute(_collection(schema, weighted=self.weighted))
        _lay_over(self._parallel, schema, tables)

    def bags(self, rows_N: Int64s, slots_BC: Int64s, lengths_BF: npt.NDArray[np.int32]) -> Bags:
        """What to look up for some rows of a batch; slots are global, -1 (nothing there) is left out."""
        most = len(rows_N) * slots_BC.shape[1]
        slots_J, weights_J = np.empty(most, np.int64), np.empty(most if self.weighted else 0, np.float32)
        lengths_FN = np.empty((len(self._plan_F5), len(rows_N)), np.int64)
        count = fill_bags(rows_N, slots_BC, lengths_BF, self._plan_F5, slots_J, lengths_FN, weights_J)
        return Bags(slots_J[:count], lengths_FN, weights_J[:count] if self.weighted else None)

    def __call__(self, bags: Bags) -> Tensor:
        """Pooled rows [N, Y], side by side in `feature_order`."""
        weights_J = None if bags.weights_J is None else torch.from_numpy(bags.weights_J)
        jagged = KeyedJaggedTensor(
            keys=self._keys,
            values=torch.from_numpy(bags.slots_J),
            lengths=torch.from_numpy(bags.lengths_FN.reshape(-1)),
            weights=weights_J,
        )
        pooled: Tensor = self._parallel(jagged).values()
        return pooled


def _name(table: Table) -> str:
    """Names of our own, because ours may hold dots, which modules do not allow."""
    return f"table{table.index}"


def _key(id_feature: int) -> str:
    return f"feature{id_feature}"


def _collection(schema: Schema, *, weighted: bool) -> EmbeddingBagCollection:
    """The tables, without memory yet, each with the optimizer that backward applies to it."""
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
    for table in schema.tables:
        bag = collection.embedding_bags[_name(table)]
        # torch's own, for torchrec has deprecated its public name for this and calls it in turn.
        fuse(RowWiseAdagrad, bag.parameters(), {"lr": table.lr, "eps": table.eps})
    return collection


def _distribute(collection: EmbeddingBagCollection) -> DistributedModelParallel:
    """Place all tables on the one rank, fused; raises where the optimizer is not in backward after all."""
    sharder = EmbeddingBagCollectionSharder(fused_params={"bounds_check_mode": BoundsCheckMode.FATAL})
    plan = construct_module_sharding_plan(
        collection,
        {name: table_wise(rank=0, compute_kernel="fused") for name in collection.embedding_bags},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type=CPU.type,
    )
    parallel = DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(world_of_one()),
        device=CPU,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    fused = parallel.fused_optimizer.state_dict()["state"]
    wanted = len(collection.embedding_bags)
    if len(fused) != wanted:
        raise LivebedError(f"torchrec fused the optimizers of {len(fused)} tables of {wanted}: rows would not train")
    return parallel


def _lay_over(parallel: DistributedModelParallel, schema: Schema, tables: Tables) -> None:
    """Let every fused kernel work on the arrays of `Tables`, each table at its own offset there."""
    base_T = {_name(table): table.index for table in schema.tables}
    for fused in _fused_modules(parallel.module):
        order = [base_T[shard.name] for shard in fused.config.embedding_tables for _ in shard.feature_names]
        fbgemm = fused.emb_module
        fbgemm.weights_host.data = torch.from_numpy(tables.weights)
        fbgemm.momentum1_host.data = torch.from_numpy(tables.accumulators)
        fbgemm.weights_offsets.copy_(torch.from_numpy(tables.weight_base_T[order]))
        fbgemm.momentum1_offsets.copy_(torch.from_numpy(tables.slot_base_T[order]))


def _fused_modules(sharded: Any) -> Iterator[Any]:
    """torchrec's wrappers of the fbgemm modules: one for each learning rate and eps."""
    for lookup in sharded._lookups:  # a plain list, which `modules()` does not enter
        yield from (module for module in lookup.modules() if hasattr(module, "emb_module"))


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
