"""The page is one safe file that says what happened; the card loads and reproduces; the plot is stable."""

import dataclasses
import json
import re
import struct
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import yaml

from requant.display import format_bytes, format_seconds
from requant.evaluation.perplexity import Protocol, Quality
from requant.evaluation.samples import Sample
from requant.report.plots import alternatives_plot, plot_width, quality_plot, sensitivity_plot
from requant.report.report import (
    BudgetSummary,
    CalibrationText,
    MatrixRow,
    RunSummary,
    heat_map,
    model_card,
    render_report,
)
from requant.report.verdicts import verdicts

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


def test_the_page_is_whole_offline_and_says_what_happened():
    source = render_report(summary())
    page = Page(source)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)  # markers inside the SVG
    assert "@import" not in source and "url(http" not in source
    assert 'name="viewport"' in source and "prefers-color-scheme: dark" in source
    words = re.sub(r"\s+", " ", "".join(page.words))
    for said in (
        "demo at 3.37 bits per weight",
        "8.0 MiB → 3.3 MiB (1 : 2.5)",
        "1.1 GiB",  # peak memory
        "1 min 44 s",
        "set sensitivity.nodes to gauss4",
        "7f" * 32,
        "53" * 32,
        "40 windows of 512 tokens; 20,440 tokens scored",
        "requant.load('demo-requant-3bit')",
        "method: kmeans",
        "model.layers.3.self_attn.down_proj",
    ):
        assert said in words, said


def test_the_page_of_a_run_without_scores_or_scores_of_quality():
    bare = summary(
        matrices=matrices(2, ()),
        before=None,
        after=None,
        delta_loss=None,
        original_loss=None,
        block_delta_loss={},
        seconds={},
        peak_memory=0,
        warnings=(),
    )
    page = Page(render_report(bare))
    assert "svg" not in page.tags
    assert "perplexity" not in "".join(page.words)
    assert "perplexity" not in model_card(bare)


def test_strings_of_strangers_stay_text():
    hostile = summary(
        model=HOSTILE,
        base_model=HOSTILE,
        checkpoint=HOSTILE,
        recipe=f"model: {HOSTILE}\n````",
        warnings=[HOSTILE],
        device=HOSTILE,
        sizes={HOSTILE: 10},
        seconds={HOSTILE: 1.0},
        calibration=CalibrationText(name=HOSTILE, sha256=HOSTILE, num_samples=1, seq_len=8),
        matrices=[dataclasses.replace(row, name=HOSTILE, kind=HOSTILE) for row in matrices(2)],
    )
    page = Page(render_report(hostile))
    assert "script" not in page.tags
    assert "{{ 7*7 }}" in "".join(page.words)  # shown, not evaluated

    card = model_card(hostile)
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["base_model"] == HOSTILE
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^(`{3,}).*?^\1", "", body))
    assert "<script>" not in prose
    assert "`````yaml" in card  # the fence is longer than the recipe's own


def test_heat_map_places_every_sum():
    rows = [row for row in matrices(3) if not (row.block == 1 and row.kind == "k_proj")]
    heat = heat_map(summary(matrices=rows))
    assert heat is not None
    assert heat.score == "pqi" and heat.kinds == ["q_proj", "k_proj", "down_proj"]
    assert heat.rows[1] == [pytest.approx(0.0), None, pytest.approx(0.004)]
    assert heat.largest == pytest.approx(0.006)
    Page(render_report(summary(matrices=rows)))


def test_heat_map_of_what_was_measured_shares_the_scale():
    rows = [dataclasses.replace(row, delta_loss=0.05 * row.block) for row in matrices(3)]
    heat = heat_map(summary(matrices=rows))
    assert heat is not None and heat.largest == pytest.approx(0.1)
    assert heat.measured[2] == [pytest.approx(0.1)] * 3 and heat_map(summary()).measured == {}
    words = "".join(Page(render_report(summary(matrices=rows))).words)
    assert "predicted" in words and "with that matrix alone quantized" in words and "measured dF" in words
    assert "with that matrix alone" not in "".join(Page(render_report(summary())).words)


def test_bytes_by_what_they_are_spent_on():
    parts = {
        "codes": 600,
        "padding": 40,
        "levels": 60,
        "sparse_values": 30,
        "embedding": 100,
        "new": 7,
        "head": 0,
    }
    run = summary(sizes=parts)
    assert run.spending == {
        "codes": 640,
        "scales and levels": 60,
        "sparse part": 30,
        "embedding": 100,
        "norms and other": 7,
    }
    assert sum(run.spending.values()) == sum(parts.values())
    page = render_report(run)
    assert page.count('<i style="width:') >= 5 and "every part</summary>" in page


def test_the_alternatives_stand_beside_the_choice():
    budget = BudgetSummary(
        target="3.2bit",
        bytes=3_000_000,
        written=2_990_000,
        predictor="curvature",
        predicted=0.03,
        loss_curve={2_700_000: 0.05, 3_300_000: 0.02},
        embedding_bits=16,
        head_bits=16,
    )
    page = Page(render_report(summary(budget=budget)))
    assert page.tags.count("svg") == 2 and "the budget that was used" in "".join(page.words)
    assert Page(render_report(summary())).tags.count("svg") == 1  # no budget: no curve
    svg = alternatives_plot(budget.loss_curve, (budget.written, 0.03), 0.27)
    assert svg == alternatives_plot(budget.loss_curve, (budget.written, 0.03), 0.27) and b"measured" in svg
    assert b"measured" not in alternatives_plot(budget.loss_curve, (budget.written, 0.03))


def test_a_wide_range_is_logarithmic_with_ticks_in_plain_decimals():
    """One damaged checkpoint must not press the others into one line; 10⁻² is no tick."""
    points = {"a": (2_000_000, 0.18, 0.003), "b": (1_500_000, 5.6, 0.05), "c": (1_700_000, 0.4, None)}
    wide = ElementTree.fromstring(quality_plot(points, measure="mean KL, nats per token"))
    ticks = {float(text): y for text, y in labelled(wide) if "." in text or text.isdigit()}
    assert {0.2, 0.5, 1, 2, 5} <= ticks.keys()
    assert ticks[0.5] - ticks[1] == pytest.approx(ticks[1] - ticks[2], abs=0.01)
    near = ElementTree.fromstring(
        quality_plot({"a": (1, 0.2, None), "b": (2, 0.3, None)}, measure="mean KL, nats per token")
    )
    assert "0.00" in dict(labelled(near))  # linear, from zero


def test_error_bars_of_kl():
    points = {"a": (2_000_000, 0.2, None), "b": (1_500_000, 0.3, None)}
    plain = quality_plot(points, measure="mean KL, nats per token")
    barred = quality_plot({**points, "b": (1_500_000, 0.3, 0.05)}, measure="mean KL, nats per token")
    assert b"LineCollection_1" in barred and b"LineCollection" not in plain


def labelled(svg: ElementTree.Element) -> list[tuple[str, float]]:
    """The texts of the tick labels of the y axis, with their height."""
    found = []
    for group in svg.iter("{http://www.w3.org/2000/svg}g"):
        if group.get("id", "").startswith("ytick_"):
            for text in group.iter("{http://www.w3.org/2000/svg}text"):
                at = re.search(r"translate\(\S+ (\S+)\)", text.get("transform", ""))
                y = float(at.group(1)) if at else float(text.get("y", "nan"))
                found.append(("".join(text.itertext()).strip(), y))
    return found


def test_verdicts_say_what_is_wrong_and_what_to_do() -> None:
    assert verdicts(summary()) == []
    damaged = verdicts(summary(after=dataclasses.replace(quality(400.0, 1.98), top1_agreement=0.32)))
    assert (
        len(damaged) == 1 and "The model is damaged: KL is 1.98" in damaged[0] and "times 7.2" in damaged[0]
    )
    assert (
        "32% of the most likely" in damaged[0]
        and "more --code-bits or --mode best --method trellis or --finetune-steps" in damaged[0]
    )
    few = verdicts(summary(after=dataclasses.replace(quality(26.0, 0.2), top1_agreement=0.5)))
    flat = quality(26.0, 0.004)  # of an untrained model, whose tokens are equally likely
    assert verdicts(summary(after=dataclasses.replace(flat, top1_agreement=0.47))) == []
    assert len(few) == 1 and "damaged" in few[0]
    grown = verdicts(summary(bytes_after=8_397_312))
    assert len(grown) == 1 and "did not shrink: 8.0 MiB before, 8.0 MiB now" in grown[0]


@pytest.mark.parametrize(
    ("written", "mode", "said"),
    [
        (None, "dense", "give more --code-bits or"),
        (None, "sparse", "give more --bits or"),
        (1_000_000, "dense", "give more --bits or"),
        (summary().bytes_after, "dense", "give a larger --size or"),
    ],
)
def test_the_remedy_names_the_option_of_the_run(written, mode, said) -> None:
    """--bits, --code-bits and --size exclude one another."""
    budget = written and BudgetSummary(
        target="", bytes=written, written=written, predictor="curvature", predicted=None, loss_curve={},
        embedding_bits=16, head_bits=16,
    )  # fmt: skip
    damaged = dataclasses.replace(quality(400.0, 1.98), top1_agreement=0.32)
    assert said in verdicts(summary(after=damaged, budget=budget, mode=mode))[0]


@pytest.mark.parametrize(
    ("predicted", "measured", "changes", "said"),
    [
        (0.02, 0.18, {}, True),
        (0.02, 0.18, {"embedding_and_head_delta": -0.15}, False),  # what was predicted for both
        (0.02, 0.03, {}, False),
        (0.001, 0.009, {}, False),  # noise
        (0.30, 0.10, {"mode": "dense"}, True),
        (0.30, 0.10, {"mode": "paper"}, False),  # the sparse part gained it
        (0.30, 0.10, {"mode": "dense", "seconds": {"finetuning": 5.0}}, False),  # training gained it
    ],
)
def test_a_prediction_that_was_wrong_is_said(predicted, measured, changes, said) -> None:
    budget = BudgetSummary(
        target="3bit", bytes=3, written=3, predictor="curvature", predicted=predicted, loss_curve={},
        embedding_bits=16, head_bits=16,
    )  # fmt: skip
    found = verdicts(summary(budget=budget, delta_loss=measured, **changes))
    assert [f"a loss of {predicted:.3f} nats" in sentence for sentence in found] == [True] * said


def test_sentences_show_commands_as_code_and_keep_options_whole() -> None:
    page = render_report(summary(warnings=["give `requant quantize` or --finetune-steps 100 <b>", "a -- b`"]))
    assert (
        '<code>requant quantize</code> or <span class="nowrap">--finetune-steps</span> 100 &lt;b&gt;' in page
    )
    assert "<li>a -- b`</li>" in page


def test_samples_are_text():
    samples = [Sample(prompt="Once " + HOSTILE, before="upon a time", after=HOSTILE)]
    page = Page(render_report(summary(samples=samples)))
    words = "".join(page.words)
    assert "script" not in page.tags and "upon a time" in words and words.count("{{ 7*7 }}") == 2
    alike = [Sample(prompt="Once", before=" upon a time", after=" upon a hill")]
    assert '<span class="same"> upon a </span>time' in render_report(summary(samples=alike))
    assert "the same text" not in render_report(summary(samples=alike))
    equal = [dataclasses.replace(alike[0], after=alike[0].before)]
    assert "the same text" in render_report(summary(samples=equal))
    assert "before and after" not in "".join(Page(render_report(summary())).words)


def test_the_quality_table():
    words = re.sub(r"\s+", " ", " ".join(Page(render_report(summary())).words))
    assert "perplexity 22.080 25.310 +14.6 %" in words and "99th percentile KL 0 1.1106" in words
    damaged = summary(after=quality(2208.0, 5.6))
    assert "2208.000 × 100" in re.sub(r"\s+", " ", " ".join(Page(render_report(damaged)).words))
    for once in ("25.31", "0.1234", "3.3 MiB", "3.371", "6.441"):  # no headline is repeated
        assert words.count(once) == 1 + (once == "3.371"), once  # and the sum of the parts


def test_scores_add_up():
    run = summary(3)
    total = sum(row.predicted["pqi"] for row in run.matrices)
    assert run.scores == ["pqi", "hessian", "gradient"]
    assert run.predicted("pqi") == pytest.approx(total)
    assert sum(run.predicted_blocks("pqi").values()) == pytest.approx(total)
    json.dumps(run.to_dict())


def test_the_card_loads_and_reproduces():
    card = model_card(summary(base_model="org/Model-1B", model="org/Model-1B", checkpoint="my model"))
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "org/Model-1B" and front["library_name"] == "requant"
    assert "requant quantize --model org/Model-1B --recipe recipe.yaml --output 'my model'" in card
    assert "requant.load('my model')" in card
    assert card.index("import requant  #") < card.index("from transformers import")
    assert "RANDOM weights" in card
    assert "| perplexity | 22.08 | 25.31 |" in card
    assert "base_model" not in model_card(summary())


@pytest.mark.parametrize("blocks", [1, 4, 80])
def test_plot_is_deterministic_svg_of_its_width(blocks):
    predicted = {"pqi": dict.fromkeys(range(blocks), 0.01), "gradient": dict.fromkeys(range(blocks), -0.02)}
    svg = sensitivity_plot(predicted, dict.fromkeys(range(blocks), 0.011))
    assert svg == sensitivity_plot(predicted, dict.fromkeys(range(blocks), 0.011))
    root = ElementTree.fromstring(svg)
    assert float(root.attrib["width"].removesuffix("pt")) == pytest.approx(plot_width(blocks) * 0.75)
    assert b"currentColor" in svg and b"PQI" in svg


def test_plot_as_png():
    png = sensitivity_plot({"pqi": {0: 0.1}}, {}, format="png")
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">I", png[16:20])[0] == 2 * plot_width(1)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (8_397_312, "8.0 MiB"), (5 * 2**30, "5.0 GiB"), (2**50, "1024.0 TiB")],
)
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (59.99, "1 min 00 s"), (92, "1 min 32 s"), (7380, "2 h 03 min"), (360_000, "4 d 04 h")],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text
