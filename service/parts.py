"""What a worker is made of; every face is a function of it."""

from dataclasses import dataclass

from service.access import Access
from service.admission import Admission
from service.health import Health
from service.ingest import Ingest
from service.live_model import LiveModel
from service.meters import Meters
from service.operations import Operations
from service.proto_wire import Messages
from service.quota import Quotas
from service.request_log import RequestLog
from service.search import Search
from service.search_wire import Searches
from service.wire import Requests
from trainer.schema import Schema
from trainer.settings import Limits, Settings


@dataclass(frozen=True)
class Parts:
    """The parts of one worker."""

    settings: Settings
    schema: Schema
    model: LiveModel
    requests: Requests
    messages: Messages
    ingest: Ingest
    health: Health
    meters: Meters
    operations: Operations
    admission: Admission
    quotas: Quotas
    request_log: RequestLog
    search: Search
    searches: Searches
    access: Access | None = None  # none: no tokens, whoever reaches a listener may call it

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        return self.settings.serving.limits
