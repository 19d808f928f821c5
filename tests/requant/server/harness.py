"""A small model that can be slowed down, and its server on a free port."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn

try:
    import httpx
except ImportError:  # OpenAI's client brings the one or the other
    import httpx2 as httpx

from requant.server.app import create_app
from requant.server.connection import Connection
from requant.server.engine import Engine
from requant.server.protocol import Limits
from requant.server.run import _bound

__all__ = ["LIMITS", "Slow", "httpx", "running"]
LIMITS = Limits(max_tokens=40, context=100, body_bytes=20_000, waiting=4)


class Slow(torch.nn.Module):
    """The model, with a pause before every step."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.pause, self.steps = model, 0.0, 0
        self.config, self.device, self.generation_config = model.config, model.device, model.generation_config

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.steps += 1
        time.sleep(self.pause)
        return self.model(*arguments, **named)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[str]:
    listener = _bound("127.0.0.1", 0)
    config = uvicorn.Config(create_app(engine, model="tiny", **options), http=Connection, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        engine.close()
        engine.join()
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()
