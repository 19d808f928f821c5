"""The engine over the kernels and a captured step, whose graph is made in the worker's thread."""

import asyncio
from pathlib import Path

import pytest
import torch

from requant.inference.decode import generate_tokens
from requant.inference.load import open_served
from requant.models.loading import load_tokenizer
from requant.server.engine import Engine
from requant.server.protocol import Limits, Sampling

pytestmark = pytest.mark.gpu


def test_answers_are_those_of_generate(pristine_checkpoint: Path) -> None:
    model = open_served(str(pristine_checkpoint), device="cuda", dtype="bfloat16")
    tokenizer = load_tokenizer(str(pristine_checkpoint))
    prompts = ("The city of", "A", "The city of")
    expected = [
        tokenizer.decode(
            generate_tokens(
                model,
                torch.tensor([tokenizer(prompt)["input_ids"]], device="cuda"),
                max_new_tokens=12,
                temperature=0.0,
                generator=torch.Generator("cuda"),
            )
        )
        for prompt in prompts
    ]
    engine = Engine(model, tokenizer, limits=Limits(max_tokens=32, context=100))
    engine.ends = frozenset()

    async def ask(prompt: str) -> str:
        job = engine.submit(await engine.tokens_of(prompt), Sampling(max_tokens=12, temperature=0))
        return "".join([piece.text async for piece in job.pieces()])

    async def all_of_them() -> list[str]:
        return list(await asyncio.gather(*map(ask, prompts)))

    try:
        assert asyncio.run(all_of_them()) == expected
        seeded = Sampling(max_tokens=12, temperature=1.0, seed=3)

        async def twice() -> list[str]:
            texts = []
            for _ in range(2):
                job = engine.submit(await engine.tokens_of("A"), seeded)
                texts.append("".join([piece.text async for piece in job.pieces()]))
            return texts

        one, two = asyncio.run(twice())
        assert one == two
    finally:
        engine.close()
        engine.join()
