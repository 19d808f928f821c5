"""Sample the demo's text: `requant/data/demo-text/calibration.txt` and `evaluation.txt`.

    python eval/make_demo_text.py

The text is our own, so that the demo needs nobody else's licence: `../shared/models/bench-32m` writes it, in float32 at
temperature 1, by nucleus sampling with a fixed seed. Every document starts from `<|endoftext|>` and ends where the model
ends it, or with the last whole sentence before `MAX_TOKENS`. Documents go alternately to the half for calibration and to the
half for scoring. The same machine with the same version of torch writes the same bytes.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from requant.text.sampling import sample_documents

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT.parent / "shared" / "models" / "bench-32m"
OUTPUT = ROOT / "requant" / "data" / "demo-text"
MIN_CHARACTERS = 420_000
BATCH_SIZE, MAX_TOKENS, TOP_P, SEED = 64, 512, 0.95, 20_250_301
SENTENCE_ENDS = (".", "!", "?", '"', "”")


def clean(text: str, *, finished: bool) -> str:
    """A document without incomplete characters; an unfinished one is cut after its last whole sentence."""
    text = text.replace("\ufffd", "").strip()
    if finished:
        return text
    last = max(text.rfind(mark + gap) for mark in SENTENCE_ENDS for gap in (" ", "\n"))
    return text[: last + 1]


def main() -> None:
    torch.set_num_threads(2)  # fixed, because the order of summation depends on it
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(SEED)
    end = tokenizer.eos_token_id
    documents: list[str] = []
    while sum(map(len, documents)) < MIN_CHARACTERS:
        for row in sample_documents(
            model,
            start=end,
            end=end,
            batch_size=BATCH_SIZE,
            max_tokens=MAX_TOKENS,
            generator=generator,
            top_p=TOP_P,
            progress=True,
        ):
            if text := clean(tokenizer.decode(row), finished=len(row) < MAX_TOKENS):
                documents.append(text)
        print(f"{len(documents)} documents, {sum(map(len, documents)):,} characters")
    for name, half in (("calibration", documents[0::2]), ("evaluation", documents[1::2])):
        (OUTPUT / f"{name}.txt").write_text("\n\n".join(half) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
