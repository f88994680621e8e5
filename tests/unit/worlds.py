"""Small configurations that several tests share."""

from typing import Any

from trainer.schema import Schema
from trainer.settings import Settings

# One feature of each kind, two over one table, an entity that knows three of them.
EVERY_KIND: dict[str, Any] = {
    "tables": {"user": {"width": 8, "capacity": 1000}, "item": {"width": 4, "capacity": 1000}, "hour": {"width": 4}},
    "entities": {"item": {"key": "item_id", "capacity": 500}},
    "features": {
        "user_id": {"kind": "categorical", "table": "user"},
        "item_id": {"kind": "categorical", "table": "item"},
        "previous": {"kind": "list", "table": "item", "max_length": 3, "pooling": "mean"},
        "hour": {"kind": "categorical", "source": "$time", "transform": "hour"},
        "price": {"kind": "numeric", "transform": "log1p", "entity": "item"},
        "tags": {"kind": "list", "table": "item", "max_length": 4, "pooling": "sum", "entity": "item"},
        "content": {"kind": "vector", "width": 3, "entity": "item"},
    },
}


def every_kind(**overrides: Any) -> tuple[Settings, Schema]:
    """Settings and schema of the configuration above."""
    settings = Settings.load(None, {**EVERY_KIND, **{k.replace("__", "."): v for k, v in overrides.items()}}, {})
    return settings, Schema.from_settings(settings)
