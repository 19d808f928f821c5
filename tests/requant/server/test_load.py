"""The server under a crowd: patient clients, slow readers, clients that leave, huge bodies and half-sent requests."""

import asyncio
import json
import signal
import statistics
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("fastapi")

from .test_serve_command import start

HEALTH_MEDIAN, HEALTH_WORST = 0.25, 3.0  # seconds
MEMORY = 200 << 20  # bytes beyond those of the idle server
SETTLED = 45.0  # seconds until descriptors are what they were, of which 10 are the header clock's


def request(path: str, body: bytes, *, method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def completion(**fields: object) -> bytes:
    body = {"prompt": "The city", "max_tokens": 40, "stream": True} | fields
    return request("/v1/completions", json.dumps(body).encode())


class Crowd:
    """Clients of one server; each of its methods is one client."""

    def __init__(self, address: str) -> None:
        self.host, port = address.removeprefix("http://").split(":")
        self.port = int(port)
        self.latencies: list[float] = []

    async def talk(self, sent: bytes, *, pause: float = 0.0, at_most: int = 1 << 30) -> bytes:
        """What the server answers to `sent`, read in parts of 64 bytes with a pause after each, if there is one."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        received = b""
        try:
            writer.write(sent)
            await writer.drain()
            while len(received) < at_most and (part := await reader.read(64 if pause else 1 << 16)):
                received += part
                await asyncio.sleep(pause)
        except ConnectionError:  # refused while it was still sending
            pass
        finally:
            writer.transport.abort()
        return received

    async def patient(self) -> bool:
        answer = await self.talk(completion())
        return b" 200 " in answer[:20] and answer.rstrip().endswith(b"0") and b"[DONE]" in answer

    async def poll_health(self) -> None:
        while True:
            before = time.monotonic()
            assert b"ok" in await self.talk(request("/health", b"", method="GET"))
            self.latencies.append(time.monotonic() - before)
            await asyncio.sleep(0.1)


async def crowd(address: str) -> Crowd:
    clients = Crowd(address)
    health = asyncio.create_task(clients.poll_health())
    half = request("/v1/completions", bytes(100))
    others = [
        *(clients.talk(completion(), pause=0.05) for _ in range(20)),
        *(clients.talk(completion(), at_most=10) for _ in range(20)),
        *(clients.talk(request("/v1/completions", bytes(10 << 20))) for _ in range(10)),
        *(clients.talk(half[:20]) for _ in range(25)),
        *(clients.talk(completion(prompt="x" * 900_000)) for _ in range(10)),
    ]
    patient = [clients.patient() for _ in range(100)]
    served, _ = await asyncio.gather(asyncio.gather(*patient), asyncio.gather(*others))
    health.cancel()
    assert all(served)
    return clients


@pytest.mark.slow
def test_a_crowd(pristine_checkpoint: Path) -> None:
    process, address, _ = start(pristine_checkpoint, "--device", "cpu", "--max-waiting", 256)
    try:
        server = psutil.Process(process.pid)
        asyncio.run(Crowd(address).patient())  # what is made once
        memory, descriptors = server.memory_info().rss, server.num_fds()
        clients = asyncio.run(crowd(address))
        assert server.memory_info().rss - memory < MEMORY
        assert statistics.median(clients.latencies) < HEALTH_MEDIAN and max(clients.latencies) < HEALTH_WORST
        until = time.monotonic() + SETTLED
        while server.num_fds() > descriptors + 2 and time.monotonic() < until:
            time.sleep(0.5)
        assert server.num_fds() <= descriptors + 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()
