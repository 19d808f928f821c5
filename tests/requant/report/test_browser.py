"""The pages in headless Chromium: nothing is fetched; on a phone nothing scrolls sideways and no heading is broken; dark
follows the system."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from requant.evaluation.samples import Sample
from requant.report.compare import Entry, render_comparison
from requant.report.report import BudgetSummary, render_report

from .summaries import HOSTILE, matrices, summary

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium on PATH")
PROBE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("*")].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth
    && getComputedStyle(e).overflowX === "visible" && !e.closest("svg") && getComputedStyle(e).display !== "inline");
  document.title = JSON.stringify({
    inner: innerWidth, page: document.documentElement.scrollWidth, wide: wide.map(e => e.outerHTML.slice(0, 90)),
    cut: [...document.querySelectorAll(".box")].filter(e => e.scrollWidth > e.clientWidth)
      .map(e => e.innerText.slice(0, 40)),
    broken: [...document.querySelectorAll(".box thead:not(.labels) th")].filter(e => {
      const words = document.createRange();
      words.selectNodeContents(e);
      return e.innerText && !e.innerText.includes(" ") && words.getClientRects().length > 1;
    }).map(e => e.innerText),
    fetched: performance.getEntriesByType("resource").map(e => e.name),
    background: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    width: document.body.getBoundingClientRect().width, heat: document.querySelectorAll("td.loss, td.gain").length,
  });
});</script>"""


def opened(page: str, folder: Path, *, width: int, dark: bool = False) -> dict[str, Any]:
    """What the browser says of a page, in a frame as wide as a phone (a window has a least width)."""
    (folder / "page.html").write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    frame = (
        f'<iframe id="f" src="page.html" style="width:{width}px;height:900px;border:0"></iframe><script>'
        'addEventListener("load", () => setTimeout(() => { document.title = f.contentDocument.title; }, 50));</script>'
    )
    (folder / "frame.html").write_text(
        f"<!doctype html><title>-</title><body style='margin:0'>{frame}</body>"
    )
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--window-size=1600,1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=2000", "--dump-dom",
        (folder / "frame.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title and title.group(1).startswith("{"), done.stderr[-500:]
    return json.loads(title.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def full_report() -> str:
    rows = matrices(30)
    measured = {row.block: {other.kind: 0.002 * row.block - 0.001 for other in rows} for row in rows}
    budget = BudgetSummary(
        target="3.2bit", bytes=3_500_000, written=3_412_345, predictor="curvature", predicted=0.03,
        loss_curve={3_100_000: 0.05, 3_900_000: 0.02}, embedding_bits=16, head_bits=16,
    )  # fmt: skip
    samples = [Sample(prompt="Once upon a time", before="there " * 40, after="x" * 400)]
    return render_report(
        summary(
            30,
            matrices=rows,
            kind_delta_loss=measured,
            budget=budget,
            samples=samples,
            recipe="text: " + "long/" * 80 + "\n",
        )
    )


def full_lineup() -> str:
    entry = Entry(
        name="checkpoints/" + "Llama-3.2-1B-requant-3bit", bytes=3_412_345, bits_per_weight=3.4,
        spending={"codes": 1_000_000, "embedding": 2_000_000}, kinds={"q_proj": 3.2, "down_proj": 3.6},
        model="demo", method="kmeans", mode="paper", original_perplexity=22.0, perplexity=25.0, mean_kl=0.1,
        p99_kl=1.0, top1_agreement=0.8, protocol="t (sha256 1), 2 x 8 tokens", window_kl=(0.09, 0.11), calibration="c",
        delta_loss=0.02, block_delta_loss={0: 0.1, 1: -0.2},
    )  # fmt: skip
    finetuned_params = [
        dataclasses.replace(entry, name=name, bytes=b, mean_kl=k)
        for name, b, k in (("b", 4_000_000, 0.05), (HOSTILE, 5_000_000, 0.01))
    ]
    return render_comparison([entry, *finetuned_params])


PAGES = {"report": full_report, "lineup": full_lineup}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_is_fetched_and_nothing_scrolls_sideways(page: str, width: int, tmp_path: Path) -> None:
    found = opened(PAGES[page](), tmp_path, width=width)
    assert found["inner"] == width and found["page"] == width and found["wide"] == []
    assert found["fetched"] == [] and found["heat"] >= 6
    assert found["width"] == pytest.approx(min(width, 1024)) and found["broken"] == []


def test_three_checkpoints_stand_side_by_side_on_a_phone(tmp_path: Path) -> None:
    assert opened(full_lineup(), tmp_path, width=390)["cut"] == []


def test_dark_follows_the_system(tmp_path: Path) -> None:
    light, dark = (opened(full_report(), tmp_path, width=390, dark=dark) for dark in (False, True))
    assert light["background"] == "rgb(255, 255, 255)" and dark["background"] == "rgb(21, 24, 28)"
    assert light["ink"] == "rgb(28, 33, 38)" and dark["ink"] == "rgb(228, 232, 236)"
