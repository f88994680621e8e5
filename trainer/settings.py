"""The one configuration model: a file, the environment and flags, validated before anything starts.

Order of precedence: flag > environment (`LIVEBED_SERVING__HTTP_PORT=9000`, `__` goes one level down)
> file (`livebed.yaml`) > default. Read once at the edge with `Settings.load`, frozen, passed down.
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from trainer.errors import SettingsError

ENVIRONMENT_PREFIX = "LIVEBED_"
# Short names that people already have in their environment, and the CLI's own, which are no settings.
ENVIRONMENT_ALIASES = {"REDIS_URL": "STREAM__URL", "LOG": "LOGGING__FORMAT"}
ENVIRONMENT_IGNORED = frozenset({"CONFIG", "URL", "ADMIN_URL", "TOKEN", "CA_FILE", "CLIENT_CERT", "CLIENT_KEY"})
TIME_INPUT = "$time"  # a feature whose source is this reads the event's own time, in ms since 1970 UTC

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]


class Frozen(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RowOptimizer(Frozen):
    """Optimizer of embedding rows, one accumulator a row; a slot that changes its owner starts it anew.

    `adagrad`: row-wise (fbgemm's EXACT_ROWWISE_ADAGRAD); every `decay_every` examples accumulators become
    max(floor, decay * accumulator), so that old gradients are forgotten and the step never dies. `sgd`: no state.
    `adam`: a moment for each float and one second moment a row (fbgemm's PARTIAL_ROWWISE_ADAM).
    """

    kind: Literal["adagrad", "sgd", "adam"] = "adagrad"
    lr: float = Field(0.1, gt=0)
    initial_accumulator: float = Field(0.03, ge=0)
    eps: float = Field(1e-8, gt=0)
    decay: float = Field(1.0, gt=0, le=1)
    decay_every: int = Field(1_000_000, ge=1)
    floor: float = Field(0.03, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    clip_norm: float | None = Field(None, gt=0)  # longest gradient of a row; a longer one is scaled down to it

    @model_validator(mode="after")
    def _only_adagrad_decays(self) -> Self:
        if self.kind != "adagrad" and self.decay < 1:
            raise ValueError(f"decay {self.decay:g} is of adagrad's accumulators; {self.kind} has none that may decay")
        return self


class AdmissionSettings(Frozen):
    """Which new ids get a row. Those refused read the table's default row and teach nothing.

    `all`: every id at once. `probability`: at each sighting with this probability, a function of (seed, id, place in
    the stream). `count`: from its `min_count`-th sighting on, as a count-min sketch remembers them, whose counts halve
    every `halve_every` sightings of ids without a row (none: a quarter of the sketch's bytes, twice the capacity).
    Above `pressure_from` of the capacity admission tightens: see `trainer.index`.
    """

    kind: Literal["all", "probability", "count"] = "all"
    probability: float = Field(0.1, gt=0, le=1)
    min_count: int = Field(2, ge=1, le=64)
    sketch_bytes: ByteSize | None = Field(None, ge=64)  # none: eight bytes a slot
    halve_every: int | None = Field(None, ge=1)
    pressure_from: float = Field(0.9, gt=0, le=1)


class TableSettings(Frozen):
    """An embedding table: a bounded number of rows over an unbounded id space.

    `budget_bytes` bounds all that the table costs at once: rows, optimizer state, index, sketch, and the readers' copy.
    """

    width: int = Field(16, ge=1, le=1024)
    capacity: int | None = Field(None, ge=64, lt=2**31)
    budget_bytes: ByteSize | None = None
    init_std: float = Field(0.05, ge=0)
    admission: AdmissionSettings = AdmissionSettings()
    eviction: Literal["lru", "lfu"] = "lru"
    lfu_half_life: int = Field(1_000_000, ge=1)  # rows of the stream after which a count weighs half
    ttl_s: float | None = Field(None, gt=0)
    dtype: Literal["float32"] = "float32"
    optimizer: RowOptimizer = RowOptimizer()

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.capacity is not None and self.budget_bytes is not None:
            raise ValueError("give capacity or budget_bytes, not both")
        return self


class EntitySettings(Frozen):
    """What is known of a user or an item: its key is the value of one id feature."""

    key: Name
    capacity: int = Field(100_000, ge=64, lt=2**31)


class CategoricalFeature(Frozen):
    """One id: a string or an integer, or a number that a transform turns into a bucket.

    `log2`: round(log2(max(value, 1))); `bucket`: floor(value / bucket_width); `hour` and `weekday`: of a
    time in ms since 1970 UTC. A missing value learns a row of its own (the id of the empty string).
    """

    kind: Literal["categorical"]
    table: Name | None = None
    source: str | None = None
    transform: Literal["none", "log2", "bucket", "hour", "weekday"] = "none"
    bucket_width: float = Field(1.0, gt=0)
    entity: Name | None = None


class ListFeature(Frozen):
    """Up to `max_length` ids of one table, pooled into one row; a missing or empty list is zeros."""

    kind: Literal["list"]
    table: Name | None = None
    source: str | None = None
    max_length: int = Field(16, ge=1, le=256)
    pooling: Literal["mean", "sum"] = "mean"
    entity: Name | None = None


class NumericFeature(Frozen):
    """One number. `log1p`: sign(v) * log(1 + |v|); `standard`: (v - mean) / std. Missing: `default`, untransformed."""

    kind: Literal["numeric"]
    source: str | None = None
    transform: Literal["none", "log1p", "standard"] = "none"
    mean: float = 0.0
    std: float = Field(1.0, gt=0)
    default: float = 0.0
    entity: Name | None = None


class VectorFeature(Frozen):
    """A raw vector of `width` numbers, fed to the network as it is; missing: zeros."""

    kind: Literal["vector"]
    width: int = Field(ge=1, le=4096)
    source: str | None = None
    entity: Name | None = None


FeatureSettings = Annotated[
    CategoricalFeature | ListFeature | NumericFeature | VectorFeature, Field(discriminator="kind")
]


class LabelSettings(Frozen):
    """The outcome: 0 or 1; with a threshold, any number, and 1 means at or above it."""

    name: str = "label"
    threshold: float | None = None


class DenseOptimizer(Frozen):
    """Optimizer of the dense weights, which every event updates.

    During the first `warmup_examples` the learning rate rises in a straight line. `adam` and `adamw` (decoupled
    `weight_decay`) and `clip_norm` need a pass over all weights for each update.
    """

    kind: Literal["adagrad", "sgd", "adam", "adamw"] = "adagrad"
    lr: float = Field(0.04, gt=0)
    initial_accumulator: float = Field(0.01, ge=0)
    eps: float = Field(1e-8, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    warmup_examples: int = Field(0, ge=0)
    clip_norm: float | None = Field(None, gt=0)  # longest gradient of all dense weights together, in one update


class WideSettings(Frozen):
    """FTRL-proximal of the wide weights (per id, and per hashed pair)."""

    alpha: float = Field(0.07, gt=0)
    beta: float = Field(1.0, ge=0)
    l1: float = Field(0.0, ge=0)
    l2: float = Field(0.0, ge=0)


class ModelSettings(Frozen):
    """The CTR net: wide part, hashed pairs, FM term, low-rank DCN-V2 cross and MLP, each optional.

    LR is `{wide: true, hidden: [], cross_layers: 0}`, FM adds `fm: true`, DeepFM-like has `fm` and `hidden`. The wide
    part is off by default: without it the logloss of four real logs was 0 to 0.4 % lower and a step cheaper; a rare
    label may want it.
    """

    family: Literal["ctr", "dlrm"] = "ctr"
    wide: bool = False
    wide_optimizer: WideSettings = WideSettings()
    pairs: list[tuple[Name, Name]] | Literal["all"] = []
    pair_bits: int = Field(18, ge=8, le=28)
    fm: bool = False
    cross_layers: int = Field(1, ge=0, le=4)
    cross_rank: int = Field(8, ge=1, le=256)
    hidden: list[Annotated[int, Field(ge=1, le=4096)]] = Field([64, 32], max_length=3)
    optimizer: DenseOptimizer = DenseOptimizer()
    bias_lr: float = Field(0.1, ge=0)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _something_learns(self) -> Self:
        if not (self.wide or self.pairs or self.fm or self.cross_layers or self.hidden):
            raise ValueError("no part of the model is on: set wide, pairs, fm, cross_layers or hidden")
        return self


class StreamSettings(Frozen):
    """The event log (a Redis or Valkey stream) and how the trainer reads it."""

    # None: the supervisor starts the embedded broker.
    url: Annotated[str, Field(pattern=r"^(redis|rediss|unix)://")] | None = None
    key: str = "livebed:events"
    # Memory of the embedded broker, which refuses events past it (the service then answers 507); none: a quarter of the
    # machine's.
    broker_memory_bytes: ByteSize | None = Field(None, ge=16 * 1024 * 1024)
    max_batch: int = Field(256, ge=1, le=8192)
    linger_ms: float = Field(0.0, ge=0, le=1000)
    # An event whose id was seen among the last so many events with an id is learned once; 0 learns every event.
    dedup_window: int = Field(262_144, ge=0, le=2**27)
    # What to do when the log no longer holds what comes after the checkpoint: end with an error, or say so and go on.
    on_gap: Literal["stop", "continue"] = "stop"


class CheckpointSettings(Frozen):
    """How often the trainer saves, and how many saves it keeps."""

    every_s: float = Field(30.0, gt=0)
    keep: int = Field(3, ge=1)


class GuardSettings(Frozen):
    """What must not become visible, and what then happens. A limit of none is not looked at.

    A step is held when a number in it is not finite, a touched row's or its gradient's norm is past its limit, the
    mean loss of the last `loss_window` events is `max_loss_ratio` times that of a constant that knew their label rate
    (and times what is usual, where the model has been worse than that), or the mean prediction of the last
    `calibration_window` events over their mean label is past `max_calibration_ratio` (or below its inverse).
    On three real logs with eight labels and one made with a label of 0.1 %, event by event and in batches of 256, the
    largest were: a row's norm 2.6, one event's gradient 6.6, the loss 1.24 times a constant's, calibration 1.6.
    `on_hold: rewind` goes back to the newest checkpoint and learns from there without the events of the held step, at
    most `max_rewinds` times between two checkpoints; `hold` trains on and shows nothing until released.
    """

    on_hold: Literal["rewind", "hold"] = "rewind"
    max_rewinds: int = Field(3, ge=0)
    max_row_norm: float | None = Field(100.0, gt=0)
    max_gradient_norm: float | None = Field(1e3, gt=0)
    loss_window: int = Field(1024, ge=64, le=2**20)
    max_loss_ratio: float | None = Field(2.0, gt=1)
    calibration_window: int = Field(8192, ge=64, le=2**20)
    max_calibration_ratio: float | None = Field(4.0, gt=1)
    keep: int = Field(20, ge=1)  # held steps kept on disk, with their events


class StoreSettings(Frozen):
    """The live store in shared memory."""

    num_shards: int = Field(1, ge=1, le=256)


class Limits(Frozen):
    """What one request may ask for; checked before parsing where that is possible."""

    body_bytes: ByteSize = ByteSize(2 * 1024 * 1024)
    ids: int = Field(4096, ge=1)
    candidates: int = Field(1024, ge=1)
    events: int = Field(512, ge=1)
    features: int = Field(256, ge=1)
    string_chars: int = Field(256, ge=1)
    top_k: int = Field(1000, ge=1)


class LoggingSettings(Frozen):
    """How all processes log, on standard error."""

    format: Literal["text", "json"] = "text"


class QueueSettings(Frozen):
    """Estimated work that may wait for its turn in a worker; what comes beyond it is refused (`overloaded`)."""

    read_ms: float = Field(500.0, gt=0)  # scores, ranks, lookups
    write_ms: float = Field(1000.0, gt=0)  # events


class QuotaSettings(Frozen):
    """What one client may ask for, in ids, candidates and events; each worker counts for itself."""

    ids_per_s: float | None = Field(None, gt=0)  # none: no quota
    burst: int = Field(10_000, ge=1)  # what may be asked for at once after a pause


class SearchSettings(Frozen):
    """Nearest rows. Tables above `exact_rows` get a graph in each worker that is asked, from the first search on."""

    enabled: bool = True
    exact_rows: int = Field(100_000, ge=0)  # compared one by one, in about 10 ms; a graph takes 0.5 KiB a row or more
    cpu_share: float = Field(0.2, gt=0, le=1)  # of a core, for each worker's graphs to be built and to follow


class TlsSettings(Frozen):
    """Certificates of the listeners, in PEM; read again when the files change.

    `client_ca_file`: only clients whose certificate one of these authorities has signed get a connection (mTLS).
    """

    cert_file: Path  # the server's own certificate first, then those between it and the root
    key_file: Path
    client_ca_file: Path | None = None


class ServingSettings(Frozen):
    """Where the service listens, with how many processes, and who may call it.

    `tokens_file`: see `service.tokens`; none: whoever reaches a listener may call it, so a public address is refused
    unless `insecure_no_auth` says that something before it authenticates. Tokens cross the network in clear text
    without TLS, so a public address with tokens needs `tls`, unless `insecure_plaintext` says that something before it
    ends TLS. The admin listener is on loopback, in clear text, unless it is given an address of its own.
    """

    host: str = "127.0.0.1"
    admin_host: str = "127.0.0.1"
    http_port: int = Field(8080, ge=0, le=65535)
    admin_port: int = Field(8081, ge=0, le=65535)
    grpc_port: int = Field(50051, ge=0, le=65535)
    workers: int = Field(1, ge=1, le=64)
    tokens_file: Path | None = None
    tls: TlsSettings | None = None
    insecure_no_auth: bool = False
    insecure_plaintext: bool = False
    request_timeout_s: float = Field(5.0, gt=0)  # the longest that a request may take; it may ask for less
    limits: Limits = Limits()
    queue: QueueSettings = QueueSettings()
    quota: QuotaSettings = QuotaSettings()
    # Where spans of requests go (OTLP over HTTP, extra `otel`); none: OTEL_EXPORTER_OTLP_ENDPOINT, or nowhere.
    otel_endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    slow_request_ms: float | None = Field(None, gt=0)  # requests that take longer are logged; none: none is
    search: SearchSettings = SearchSettings()

    @property
    def admin_tls(self) -> TlsSettings | None:
        """The admin listener's certificates: none on loopback, where nobody listens in."""
        return None if is_loopback(self.admin_host) else self.tls

    @model_validator(mode="after")
    def _ports_of_their_own(self) -> Self:
        ports = [port for port in (self.http_port, self.admin_port, self.grpc_port) if port]
        if len(set(ports)) < len(ports):
            raise ValueError(f"http_port, admin_port and grpc_port must differ, got {', '.join(map(str, ports))}")
        return self

    @model_validator(mode="after")
    def _closed_unless_told(self) -> Self:
        if self.tokens_file is not None and self.insecure_no_auth:
            raise ValueError("tokens_file and insecure_no_auth contradict each other: give one of them")
        if not is_loopback(self.host) and self.tokens_file is None and not self.insecure_no_auth:
            raise ValueError(
                f"host {self.host!r} is not a loopback address and there is no authentication: set tokens_file, or "
                "keep it behind a proxy that authenticates and set insecure_no_auth: true"
            )
        if not is_loopback(self.admin_host) and self.tokens_file is None:
            raise ValueError(f"admin_host {self.admin_host!r} is not a loopback address: that needs tokens_file")
        public = [host for host in (self.host, self.admin_host) if not is_loopback(host)]
        if public and self.tokens_file is not None and self.tls is None and not self.insecure_plaintext:
            raise ValueError(
                f"tokens would cross the network to {public[0]!r} in clear text: set tls, or keep it behind a proxy "
                "that ends TLS and set insecure_plaintext: true"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether a listener of that address is reached from this machine alone."""
    return host in {"localhost", "::1"} or host.startswith("127.")


class Settings(Frozen):
    """Everything Livebed can be told. One file describes trainer and service alike."""

    name: Name = "livebed"
    data_dir: Path = Path(".livebed")  # checkpoints and the embedded broker's append-only file
    run_dir: Path | None = None  # none: /dev/shm/livebed-<uid>-<name>; live store, metrics, sockets
    tables: dict[Name, TableSettings] = Field(min_length=1)
    features: dict[Name, FeatureSettings] = Field(min_length=1, max_length=256)
    entities: dict[Name, EntitySettings] = {}
    label: LabelSettings = LabelSettings()
    engine: Literal["auto", "event", "torchrec"] = "auto"
    model: ModelSettings = ModelSettings()
    stream: StreamSettings = StreamSettings()
    guard: GuardSettings = GuardSettings()
    # Cut batches by the log alone and take all times from it, so that a run is a function of the log, bit for bit.
    deterministic: bool = False
    store: StoreSettings = StoreSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    serving: ServingSettings = ServingSettings()
    logging: LoggingSettings = LoggingSettings()

    @classmethod
    def load(
        cls,
        path: Path | None,
        overrides: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Merge file, environment and overrides (`{"serving.http_port": 9000}`) and validate.

        Raises:
            SettingsError: names the field, what was got and what was expected.
        """
        merged = _read_file(path) if path is not None else {}
        for name, text in sorted((os.environ if environment is None else environment).items()):
            key = name.removeprefix(ENVIRONMENT_PREFIX)
            if name.startswith(ENVIRONMENT_PREFIX) and key not in ENVIRONMENT_IGNORED:
                _set(merged, ENVIRONMENT_ALIASES.get(key, key).lower().split("__"), _scalar(name, text))
        for dotted, value in (overrides or {}).items():
            _set(merged, dotted.split("."), deepcopy(value))
        try:
            return cls.model_validate(merged)
        except ValidationError as error:
            raise _settings_error(error, path) from None

    @property
    def run_path(self) -> Path:
        """Directory of everything that lives only while the system runs; memory-backed where there is /dev/shm."""
        if self.run_dir is not None:
            return self.run_dir
        shared_memory = Path("/dev/shm")  # noqa: S108 - a directory of our own under it, mode 0700
        base = shared_memory if shared_memory.is_dir() else self.data_dir
        return base / f"livebed-{os.getuid()}-{self.name}"

    @property
    def store_path(self) -> Path:
        """Directory of the live store's shard files."""
        return self.run_path / "store"

    @property
    def metrics_path(self) -> Path:
        """Directory of the processes' metric boards."""
        return self.run_path / "metrics"

    @property
    def checkpoint_path(self) -> Path:
        """Directory of the checkpoints."""
        return self.data_dir / self.name / "checkpoints"


class _NoDuplicates(yaml.SafeLoader):
    """YAML's safe loader, which would let the last of two equal keys win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoDuplicates)  # noqa: S506 -- a safe loader
    except UnicodeDecodeError:
        raise SettingsError(str(path), got="bytes that are not UTF-8", wanted="a YAML file in UTF-8") from None
    except OSError as error:
        raise SettingsError(
            str(path), got=error.strerror or str(error), wanted="a readable configuration file"
        ) from None
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise SettingsError(str(path), got="invalid YAML", wanted=f"a YAML mapping ({text})") from None
    if not isinstance(content, dict):
        raise SettingsError(str(path), got=type(content).__name__, wanted="a YAML mapping with `tables` and `features`")
    return content


def _scalar(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SettingsError(name, got=text, wanted="a YAML value") from None


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            child = tree[key] = {}
        tree = child
    tree[keys[-1]] = value


def _settings_error(error: ValidationError, path: Path | None) -> SettingsError:
    """Say the first problem in one sentence, and count the others."""
    problems = error.errors()
    first = problems[0]
    field = ".".join(str(part) for part in first["loc"]) or "configuration"
    where = f" in {path}" if path is not None else ""
    got = "nothing" if first["type"] == "missing" else _shortened(first["input"])
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    messages = {"missing": "this key is required", "extra_forbidden": "no such key: there is none of that name here"}
    message = messages.get(first["type"], first["msg"].removeprefix("Value error, "))
    return SettingsError(field + where, got=got, wanted=message + more)


def _shortened(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."
