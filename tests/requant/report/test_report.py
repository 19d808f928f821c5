"""The page is one safe file that says what happened; the card loads and reproduces."""

import dataclasses
import json
import re

import pytest
import yaml

from requant.evaluation.samples import Sample
from requant.report.plots import alternatives_plot
from requant.report.report import BudgetSummary, CalibrationText, heat_map, model_card, render_report

from .summaries import HOSTILE, Page, matrices, quality, summary


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
    rows = matrices(3)
    measured = {row.block: {other.kind: 0.05 * row.block for other in rows} for row in rows}
    heat = heat_map(summary(matrices=rows, kind_delta_loss=measured))
    assert heat is not None and heat.largest == pytest.approx(0.1)
    assert heat.measured[2] == [pytest.approx(0.1)] * 3 and heat_map(summary()).measured == {}
    assert heat.alone == {row.name: pytest.approx(0.05 * row.block) for row in rows}
    words = "".join(Page(render_report(summary(matrices=rows, kind_delta_loss=measured))).words)
    assert "predicted" in words and "with these matrices alone quantized" in words and "measured dF" in words
    assert "with these matrices alone" not in "".join(Page(render_report(summary())).words)


def test_experts_that_were_measured_together_have_no_number_of_their_own():
    rows = matrices(1)
    more = dataclasses.replace(rows[0], name=rows[0].name + ".other")
    heat = heat_map(summary(matrices=[*rows, more], kind_delta_loss={0: {row.kind: 0.1 for row in rows}}))
    assert heat is not None and heat.measured[0] == [0.1] * len(rows)
    assert heat.alone == {row.name: 0.1 for row in rows[1:]}


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
