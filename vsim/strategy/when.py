"""The import path of schedules of syncs for users; they are defined in `vsim.core.when`."""

from vsim.core.when import (
    QSR,
    Every,
    PostLocal,
    Seconds,
    When,
    schedule_of,
    sync_interval,
    syncs,
)

__all__ = [
    "QSR",
    "Every",
    "PostLocal",
    "Seconds",
    "When",
    "schedule_of",
    "sync_interval",
    "syncs",
]
