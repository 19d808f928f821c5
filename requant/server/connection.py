"""HTTP connections with time limits, which uvicorn has only for idle ones.

A client that never ends its headers, or never reads its answer, would hold a connection and a descriptor forever.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # from the first byte of a request to the end of its headers
READER_SECONDS = 60.0  # without reading, while an answer waits


class Connection(H11Protocol):
    """uvicorn's protocol, and two clocks."""

    header_clock: asyncio.TimerHandle | None = None
    reader_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for clock in (self.header_clock, self.reader_clock):
            if clock is not None:
                clock.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # `close` would wait until the client has read the rest
        self.reader_clock = self.loop.call_later(READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.reader_clock is not None:
            self.reader_clock.cancel()
            self.reader_clock = None

    def _watch_headers(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.header_clock is not None:
            self.header_clock.cancel()
            self.header_clock = None
        elif not answering and self.header_clock is None:
            self.header_clock = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
