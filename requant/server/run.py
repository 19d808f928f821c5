"""The command `requant serve`: bind the port, load the model, serve until a signal, shut down."""

import ipaddress
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

from requant.errors import InputError
from requant.extras import requirement
from requant.inference.load import open_served
from requant.models.devices import on_its_gpu, pick_device
from requant.models.loading import context_limit, load_config, load_tokenizer, resolve_source
from requant.server.engine import Engine
from requant.server.protocol import Limits

logger = logging.getLogger(__name__)
CONTEXT = 4096  # tokens, where the model has as many positions
GRACE = 5  # seconds for running answers to end


@on_its_gpu
def serve_checkpoint(
    checkpoint: str,
    *,
    host: str,
    port: int,
    api_key: str | None,
    name: str | None,
    context: int | None,
    max_tokens: int | None,
    waiting: int,
    batch: int | None,
    device: str,
    dtype: str,
) -> None:
    """Serve until SIGINT or SIGTERM, then return. Raises RequantError."""
    _check_installed()
    if api_key is not None and not api_key.strip():
        raise InputError("--api-key is empty; give a key, or leave the option out.")
    if name is not None and not name.strip():
        raise InputError("--name is empty; give a name, or leave the option out.")
    if not host.strip():
        raise InputError("--host is empty; give an address, or leave the option out.")
    folder, where = resolve_source(checkpoint), pick_device(device)
    positions = context_limit(load_config(folder))
    if context is None:
        context = min(CONTEXT, positions or CONTEXT)
    elif positions is not None and context > positions:
        raise InputError(
            f"--context: {context} tokens exceed the model's {positions} positions; lower it, or leave it out."
        )
    if max_tokens is None:
        max_tokens = min(Limits.max_tokens, context // 2)
    if max_tokens >= context:
        raise InputError(
            f"--max-tokens-limit {max_tokens} leaves no room for a prompt in a context of {context} tokens; lower it"
            + (", or raise --context." if positions is None or context < positions else ".")
        )
    with _bound(host, port) as listener:
        limits = Limits(max_tokens=max_tokens, context=context, waiting=waiting, batch=batch)
        model = open_served(folder, device=where, dtype=dtype)
        path = Path(os.path.expanduser(checkpoint))
        # `.` has no name of its own
        served = (path.resolve() if path.is_dir() else path).name if name is None else name
        _run(model, load_tokenizer(folder), limits, listener, served=served, api_key=api_key, host=host)


def _run(
    model: Any,
    tokenizer: Any,
    limits: Limits,
    listener: socket.socket,
    *,
    served: str,
    api_key: str | None,
    host: str,
) -> None:
    import uvicorn

    from requant.server.app import create_app
    from requant.server.connection import Connection

    engine = Engine(model, tokenizer, limits=limits)
    app = create_app(engine, model=served, api_key=api_key)
    config = uvicorn.Config(
        app, http=Connection, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE
    )

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            engine.close()  # ends open streams, so that uvicorn does not wait for them
            super().handle_exit(sig, frame)

    # uvicorn raises the signal again after its shutdown; here a requested shutdown is a success.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            listener.listen(128)  # before the next line announces the address
        except OSError as error:  # another server bound the port too, while neither listened, and was quicker
            raise _not_served_on(host, listener.getsockname()[1], error) from error
        port = listener.getsockname()[1]
        logger.warning("serving %s on http://%s:%d/v1 (context %d)", served, _url(host), port, limits.context)
        if api_key is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            logger.warning("everybody who reaches %s may use it; --api-key asks for a key", host)
        Server(config).run(sockets=[listener])
        logger.warning("stopped")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        engine.close()
        engine.join()


def _bound(host: str, port: int) -> socket.socket:
    """A bound socket, before any long work: that a port is taken should be known before the model is loaded."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # the latter for what is too long, or no text, for a name
        raise _not_served_on(host, port, error) from error
    return listener


def _not_served_on(host: str, port: int, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{host} port {port} cannot be served on ({reason}); choose another --port or --host.")


def _url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"`requant serve` needs {error.name}, which is not installed; run `pip install {requirement('serve')}`."
        ) from error
