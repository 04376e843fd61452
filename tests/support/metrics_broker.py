"""A broker that serves its metrics over HTTP."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from netshim.http.host import HttpHost, application
from netshim.http.pages import operation_routes
from netshim.request_counts import RequestCounts
from netshim.server_thread import ServerThread
from netshim.testing import unsynced_files

Samples = dict[tuple[str, ...], float]


class CountedBroker(ServerThread):
    """A broker with pages for operators."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, fs=unsynced_files(), **options)

    def _run(self) -> None:
        self.server.counts = RequestCounts()
        self.pages = HttpHost()
        app = application(operation_routes(self.server))
        self._url = self.pages.add(("127.0.0.1", 0), app)
        self.pages.start()
        super()._run()

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._url.removeprefix("http://"))
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def samples(self) -> dict[str, Samples]:
        """Return all samples by name and by the values of their labels, which are sorted by
        label.
        """
        status, text = self.get("/metrics")
        assert status == 200, text
        found: dict[str, Samples] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
        return found

    def stop(self) -> None:
        super().stop()
        self.pages.stop()
