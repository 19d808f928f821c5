"""Summaries of runs that never happened, hostile strings, and a parser that asserts that every tag of a page is closed."""

import dataclasses
from html.parser import HTMLParser

from requant.evaluation.perplexity import Protocol, Quality
from requant.report.report import CalibrationText, MatrixRow, RunSummary

HOSTILE = '<script>alert("x")</script>`| {{ 7*7 }}\n---\n\x1b[31m'


KINDS = {"q_proj": (256, 256), "k_proj": (128, 256), "down_proj": (256, 768)}


def quality(perplexity: float, kl: float | None) -> Quality:
    protocol = Protocol(text="demo-eval", sha256="7f" * 32, context=512, windows=40, tokens=40 * 511)
    if kl is None:
        return Quality(protocol=protocol, perplexity=perplexity)
    return Quality(protocol=protocol, perplexity=perplexity, mean_kl=kl, p99_kl=9 * kl, top1_agreement=0.9)


def matrices(blocks: int, scores: tuple[str, ...] = ("gradient", "pqi", "hessian")) -> list[MatrixRow]:
    return [
        MatrixRow(
            name=f"model.layers.{block}.self_attn.{kind}",
            block=block,
            kind=kind,
            n=n,
            k=k,
            bits=3.21,
            sparse_fraction=0.005,
            size_bytes=n * k * 3 // 8,
            predicted={score: (block - 1 + place) * 0.001 * (i + 1) for i, score in enumerate(scores)},
        )
        for block in range(blocks)
        for place, (kind, (n, k)) in enumerate(KINDS.items())
    ]


def summary(blocks: int = 4, **changes) -> RunSummary:
    base = RunSummary(
        model="demo",
        base_model=None,
        checkpoint="demo-requant-3bit",
        version="0.1.0",
        method="kmeans",
        mode="paper",
        bits=3,
        bits_per_weight=3.371,
        whole_bits_per_weight=6.441,
        bytes_before=8_397_312,
        bytes_after=3_412_345,
        sizes={"codes": 1_179_648, "codebooks": 92_160, "sparse values": 31_457, "embedding": 2_097_152},
        matrices=matrices(blocks),
        calibration=CalibrationText(name="demo", sha256="53" * 32, num_samples=128, seq_len=512),
        recipe="method: kmeans\nbits: 3\n",
        before=quality(22.08, None),
        after=quality(25.31, 0.1234),
        original_loss=3.0948,
        delta_loss=0.0251,
        block_delta_loss={block: 0.004 + 0.001 * block for block in range(blocks)},
        seconds={"statistics": 12.34, "quantize": 92.0},
        peak_memory=1_234_567_890,
        warnings=["predicted and measured dF differ by 3.1 %: set sensitivity.nodes to gauss4"],
    )
    return dataclasses.replace(base, **changes)


class Page(HTMLParser):
    """Tags, attributes and text; complains about what is closed out of order."""

    VOID = ("meta", "br", "wbr", "path", "use", "rect")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
