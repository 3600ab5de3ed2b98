"""A run's record while it grows: the lines of ``metrics.jsonl`` (docs/metrics.md)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: The file's name in a run's folder.
METRICS = "metrics.jsonl"


class Tail:
    """Yields each line of a record once, as soon as it is complete. A record that restarts is read again from its
    start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        """The new lines since the last call; none if there is no file yet."""
        try:
            with open(self._path, "rb") as record:
                now = os.fstat(record.fileno())
                if now.st_ino != self._file or now.st_size < self._at:
                    self._file, self._at = now.st_ino, 0
                record.seek(self._at)
                more = record.read()
        except FileNotFoundError:
            return []
        whole = more[: more.rfind(b"\n") + 1]
        self._at += len(whole)
        events = []
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a full disk has truncated this line: skip it
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
        return events
