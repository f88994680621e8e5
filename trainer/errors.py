"""Everything that can go wrong in this package, as one tree; the service maps each leaf to one answer.

    LivebedError
    |- SettingsError             the configuration: field, what was got, what is wanted
    |- BadEvent                  one event or entry: a short code (a metric label) and a sentence
    |- SchemaMismatch            a store or checkpoint was written under another schema
    |- StoreUnavailable          the live store is not there (yet)
    |- CheckpointError           a checkpoint cannot be written, or fails its checks
    |- UnsupportedByEventEngine  the model asks for what the kernel does not do, named
    |- BrokerError               the embedded broker cannot start
    |- ControlUnavailable        no trainer answers on the run directory's control socket
    |- ControlRefused            the trainer will not do what it was asked: a short code and a sentence
    `- LogError
       |- LogUnavailable         no answer from the broker in time: try again later
       |- LogFull                the broker refuses writes: out of memory or disk
       |- LogOverloaded          our own queue of appends is full: slow down
       `- LogTruncated           the log no longer holds what comes after a position

Arguments stay in `args`, so that each error survives pickling between processes.
"""
# ruff: noqa: N818 -- the names say what happened and are part of the API; the base carries "Error".


class LivebedError(Exception):
    """Base of all errors this package raises on purpose."""


class SettingsError(LivebedError):
    """A configuration value cannot be used.

    >>> str(SettingsError("model.rank", -1, "an integer >= 1"))
    'model.rank: got -1, wanted an integer >= 1'
    """

    def __init__(self, field: str, got: object, wanted: str) -> None:
        """Name the field by its path in the file, with the value as it was given."""
        super().__init__(field, got, wanted)
        self.field = field
        self.got = got
        self.wanted = wanted

    def __str__(self) -> str:
        """One line for a terminal or a log."""
        return f"{self.field}: got {self.got!r}, wanted {self.wanted}"


class BadEvent(LivebedError):
    """An event or a log entry that cannot be learned from; never stops the stream.

    `code` is one of a small fixed set (it labels a metric); `detail` names the field and the value.
    """

    def __init__(self, code: str, detail: str) -> None:
        """Take the code that labels the metric and the sentence for the one who sent the event."""
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        """One line for a terminal or a log."""
        return f"{self.code}: {self.detail}"


class SchemaMismatch(LivebedError):
    """A store, checkpoint or message was made under another schema than the one configured."""


class StoreUnavailable(LivebedError):
    """No live store can be attached: no trainer has published one in this directory."""


class CheckpointError(LivebedError):
    """A checkpoint could not be written, or none that can be read is left."""


class UnsupportedByEventEngine(LivebedError):
    """The configuration needs something that only the torchrec engine does."""


class BrokerError(LivebedError):
    """The embedded broker did not start; the sentence says why and what to do."""


class ControlUnavailable(LivebedError):
    """No trainer runs on that run directory, or it did not answer in time."""


class ControlRefused(LivebedError):
    """The trainer was asked for something it cannot do now."""

    def __init__(self, code: str, detail: str) -> None:
        """Take the code for machines and the sentence for people."""
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        """One line for a terminal or a log."""
        return self.detail


class LogError(LivebedError):
    """Base of the event log's errors."""


class LogUnavailable(LogError):
    """The broker cannot be reached, or did not answer within the time-out; the write may have happened."""


class LogFull(LogError):
    """The broker answers but refuses writes (maxmemory, or its disk); reads and trims still work."""


class LogOverloaded(LogError):
    """More appends wait in this process than its queue allows; nothing was written."""


class LogTruncated(LogError):
    """The log is shorter than, or trimmed beyond, the position it was asked to continue from."""
