"""`requant serve`."""

from typing import Annotated

import typer

from requant.cli import options as opt
from requant.cli.common import importing, say_what_is_loaded


def serve(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint or model.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="REQUANT_API_KEY", help="Require this key from clients.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients. [the folder's name]")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Most tokens of prompt and answer together. [4096, or all the positions of a shorter model]",
        ),
    ] = None,
    max_tokens_limit: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer. [1024, or half the context]")
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait in the queue.")] = 128,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Answers written at the same time. [8 on a CPU, 1 on a GPU]")
    ] = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    quiet: opt.Quiet = False,
) -> None:
    """Serve a model over OpenAI's HTTP API. Completions and chat, streamed or whole."""
    with importing():
        from requant.server.run import serve_checkpoint

    say_what_is_loaded(quiet)
    serve_checkpoint(
        checkpoint,
        host=host,
        port=port,
        api_key=api_key,
        name=name,
        context=context,
        max_tokens=max_tokens_limit,
        waiting=max_waiting,
        batch=batch,
        device=device,
        dtype=dtype,
    )
