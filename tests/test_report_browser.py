"""The report in a real browser, as a person uses it: headless Chromium, with an eye on its console.

Screenshots are kept in test-artifacts/, which git ignores.
"""

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from report_runs import HOSTILE, big_run, other_seed, rollout, write_rollouts, write_run
from sparse_rl.monitor.ratios import BINS
from sparse_rl.report import page as report
from sparse_rl.report.document import ReportSource
from sparse_rl.report.serve import make_server

ARTIFACTS = Path(__file__).parents[1] / "test-artifacts"
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    """A machine without a browser cannot say whether the page works: that is a failure, not a skipped test."""
    from playwright.sync_api import sync_playwright

    ARTIFACTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        found = CHROMIUM or playwright.chromium.executable_path
        assert Path(found).exists(), "There is no Chromium for the tests of the report: apt-get install chromium."
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, request):
    """Opens a page, and fails if the page complained or asked for anything from outside."""
    complaints, asked, pages = [], [], []

    def open_page(file, *, size=(1280, 900), dark=False):
        page = browser.new_page(
            viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light", service_workers="block"
        )
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file if str(file).startswith("http") else f"file://{file}")
        page.wait_for_selector("#summary")
        pages.append(page)
        return page

    yield open_page
    for number, page in enumerate(pages):
        page.screenshot(path=ARTIFACTS / f"{request.node.name}{number or ''}.png")
        page.close()
    assert not complaints
    assert all(url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")) for url in asked)


@pytest.fixture(scope="module")
def three(looked_at, tmp_path_factory):
    """The page of a dense run and two seeds of a sparse one."""
    folder = tmp_path_factory.mktemp("three")
    for name in ("dense", "sparse_rl"):
        shutil.copytree(looked_at / name, folder / name)
    other_seed(looked_at / "sparse_rl", folder / "sparse_rl-again", 1)
    report.write(ReportSource([folder]), folder / "report.html")
    return folder / "report.html"


def hover(page, name, part=0.5):
    """Points at a curve, `part` of the way along it."""
    chart = page.locator(f'figure[data-name="{name}"]').first
    chart.scroll_into_view_if_needed()
    over = chart.locator(".u-over")
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] / 2)
    return chart


def test_curves_answer_to_hover_and_zoom_together(tmp_path, opened):
    """Where a zoom leaves fewer than two values, as of evaluations, all are shown: a curve is never blank."""
    rows = [{"step": step, "reward/mean": step / 10, "reward/std": 0.1} for step in range(11)]
    for row in (rows[0], rows[10]):
        row["eval/sums/pass@1"] = 0.5
    report.write(ReportSource([write_run(tmp_path / "run", rows)]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    chart = hover(page, "reward/mean", 0.02)
    assert chart.locator(".step").inner_text() == "step 0"
    assert page.locator('figure[data-name="reward/std"] .step').inner_text() == "step 0"  # the cursor is everywhere
    assert chart.locator(".how").inner_text().startswith("Mean reward over rollouts with a verdict")
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.85, box["y"] + 50, steps=4)
    page.mouse.up()

    def shown(name):
        find = "name => [...charts].find(([figure]) => figure.dataset.name === name)[1].plot.scales.x"
        scale = page.evaluate(find, name)
        return scale["min"], scale["max"]

    assert 4 < shown("reward/mean")[0] < 5 and 8 < shown("reward/mean")[1] < 9
    assert shown("reward/std") == shown("reward/mean")
    assert shown("eval/sums/pass@1") == (0, 10)
    page.get_by_role("button", name="Show all steps").click()
    assert shown("reward/std") == (0, 10)


def test_the_counts_beside_the_ratio_follow_the_cursor(tmp_path, opened):
    run = write_run(tmp_path / "run", [{"step": step, "sparse/xi_p05": 0.9} for step in (1, 2)])
    lines = [{"step": step, "counts": [step] * BINS} for step in (1, 2)]
    (run / "xi.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write(ReportSource([run]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    beside = page.locator('figure[data-name="xi-step"]')
    for part, step in ((0.99, 2), (0.01, 1), (0.99, 2)):
        hover(page, "xi", part)
        assert beside.locator("h3").inner_text() == f"ξ at step {step}"
        assert sum(map(int, beside.locator("b").all_inner_texts())) == step * BINS


def test_budget_length_and_rejection_are_drawn_with_every_change(tmp_path, opened):
    """Of runs with kv.budget = auto, and of no other. A run whose correction rejects nothing is judged by unlikely rollouts.
    A reason is text, whatever it contains."""
    values = {"kv/peak_bytes": 1e6, "kv/budget": 64.0, "response/p90_tokens": 200.0}
    values |= {"sparse/rejection_rate": 0.05, "sparse/unlikely": 0.07}
    names = ("run", "naive", "other")
    run, naive, other = (write_run(tmp_path / name, [{"step": step, **values} for step in (1, 2)]) for name in names)
    for folder, method in ((run, "sparse_rl"), (naive, "naive")):
        (folder / "config.toml").write_text(f'method = "{method}"\n[kv]\nbudget = "auto"\ntarget_rejected = 0.03\n')
    lines = [
        {"step": 0, "before": 0, "after": 64, "reason": "<b>probe</b>"},
        {"step": 2, "before": 64, "after": 80, "reason": "5 of 64"},
    ]
    (run / "budget.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (naive / "budget.jsonl").write_text(json.dumps(lines[1]) + "\n")
    report.write(ReportSource([run, naive, other]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    rows = page.locator("#budgets tbody tr")
    assert [text.split("\t")[1:] for text in rows.all_inner_texts()] == [
        ["0", "probe", "64", "<b>probe</b>"],
        ["2", "64", "80", "5 of 64"],
        ["2", "64", "80", "5 of 64"],
    ]
    for name, count, labels, first in (
        ("budget", 2, ["budget", "response, 90th percentile", "response, mean"], 64),
        ("rejected", 1, ["rejected", "target"], 0.05),
        ("unlikely", 1, ["unlikely", "target"], 0.07),
    ):
        figures = page.locator(f'figure[data-name="{name}"]')
        assert figures.count() == count
        figures.first.scroll_into_view_if_needed()
        figures.first.locator("canvas").wait_for()
        shown = page.evaluate("name => [...charts].find(([f]) => f.dataset.name === name)[1].make().lines", name)
        assert [line["label"] for line in shown] == labels and shown[0]["values"] == [first, first]


def test_what_is_zero_throughout_takes_one_line(tmp_path, opened):
    values = [{"reward/timeouts": 0.0, "reward/errors": float(step == 2), "perf/step_s": 1.0} for step in (1, 2)]
    run = write_run(tmp_path / "run", [{"step": step, **row} for step, row in enumerate(values, 1)])
    report.write(ReportSource([run]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    line = page.locator("details.zero summary")
    assert line.inner_text() == "Zero throughout: reward/timeouts"
    assert page.locator('figure[data-name="reward/errors"]').is_visible()
    zero = page.locator('figure[data-name="reward/timeouts"]')
    assert not zero.is_visible()
    line.click()
    zero.locator("canvas").wait_for()


def test_ticks_of_memory_are_round_and_of_one_unit(tmp_path, opened):
    for number, most in enumerate((900, 3_000_000, 11_900_000, 26_000_000_000)):
        rows = [{"step": step, "kv/peak_bytes": most / 3, "kv/dense_bytes": most - step} for step in (1, 2)]
        run = write_run(tmp_path / str(number), rows)
        report.write(ReportSource([run]), tmp_path / "report.html")
        page = opened(tmp_path / "report.html")
        page.locator('figure[data-name="kv"] canvas').wait_for()
        read = "[...charts].find(([f]) => f.dataset.name === 'kv')[1].plot.axes[1]._values"
        zero, *ticks = page.evaluate(read)
        assert zero == "0" and 2 <= len(ticks) <= 6
        values, units = zip(*(tick.split(" ") for tick in ticks), strict=True)
        assert units[0] in ("B", "KiB", "MiB", "GiB") and set(units) == {units[0]}
        gap = float(values[0])
        assert [float(value) for value in values] == [gap * place for place in range(1, len(ticks) + 1)]
        assert len(max(values, key=len)) <= 4
    assert page.evaluate("[bytes(0), bytes(1023), bytes(2 ** 20), bytes(3.3e13)]") == ["0 B", "1020 B", "1 MiB", "30700 GiB"]


def test_runs_are_switched_off_and_on(three, opened):
    page = opened(three)
    values = page.locator('figure[data-name="sparse/xi_p05"] .value')
    page.locator('figure[data-name="sparse/xi_p05"]').scroll_into_view_if_needed()
    values.first.wait_for()
    assert values.count() == 2 and "2 seeds" in values.nth(1).inner_text()  # two seeds are one line
    assert page.locator(".card").count() == 3
    page.locator('#runs input[data-run="0"]').uncheck()
    assert values.count() == 1 and page.locator(".card").count() == 2
    page.locator('#runs input[data-run="0"]').check()
    assert values.count() == 2


def test_a_rejected_rollout_shows_its_cause_and_what_the_cache_held(three, opened):
    page = opened(three)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.get_by_label("only steps with rejected ones").check()
    page.locator(".rollout-row em").first.wait_for()
    page.locator(".rollout-row", has=page.locator("em"), has_text="with cache").first.click()
    cause = page.locator(".t.cause")
    assert cause.count() == 1 and "x5" in cause.get_attribute("class") and "at" in cause.get_attribute("class")
    told = page.locator(".token-readout").inner_text()
    assert "ξ = " in told and "dense" in told
    place, step = page.evaluate("[inspector.chunk.rollouts.indexOf(inspector.opened.rollout), inspector.step]")
    row = pq.read_table(three.parent / f"sparse_rl/rollouts/step-{step}.parquet").to_pylist()[place]
    evicted_at = np.array(row["evicted_at"]).reshape(row["evicted_at_shape"])[1, 0]
    at = page.evaluate("inspector.opened.rollout.cause")
    page.wait_for_function("at => document.getElementById('held').textContent.startsWith(`response token ${at + 1}:`)", arg=at)
    assert page.locator(".legend.cache span").all_inner_texts() == ["token held", "token evicted", "token not yet written"]
    page.locator("#layer").select_option("1")
    compactions = sorted({time for time in evicted_at.tolist() if time < len(evicted_at) - 1})
    for query in [*compactions, compactions[-1] - 1, len(evicted_at) - 2]:
        k = query + 1 - len(row["prompt_tokens"])  # the token that this query chooses
        page.locator("#time").evaluate("(slider, k) => { slider.value = k; slider.dispatchEvent(new Event('input')); }", k)
        page.wait_for_function(
            "k => document.getElementById('held').textContent.startsWith(`response token ${k + 1}:`)", arg=k
        )
        held = (evicted_at[: query + 1] > query).sum()
        assert f": {held} of {query + 1} tokens held" in page.locator("#held").inner_text()
        shown = {name: page.locator(f".tokens .t.{name}").count() for name in ("held", "gone", "later")}
        assert shown == {"held": held, "gone": query + 1 - held, "later": len(evicted_at) - query - 1} and held <= 26


def test_a_rollout_without_its_evictions_says_why_and_what_to_set(three, opened):
    page = opened(three)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator(".rollout-row").first.wait_for()
    assert page.locator("#time").count() == 1
    page.locator(".rollout-row", has_not_text="with cache").first.click()
    assert page.locator("#time").count() == 0
    assert "were not stored: raise log.traces_per_step, here 2, to store more" in page.locator("#rollout").inner_text()
    page.locator("#pick-run").select_option(label="dense")
    page.get_by_text("This cache evicts nothing").wait_for()


def test_token_by_token_with_the_keyboard(three, opened):
    page = opened(three)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#pick-run").select_option(label="dense")
    page.locator(".facts", has_text="took part").wait_for()
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    assert "response token 1 " in page.locator(".token-readout").inner_text().replace("·", "")
    page.keyboard.press("ArrowLeft")
    assert "prompt token" in page.locator(".token-readout").inner_text()


@pytest.mark.parametrize("look", ["light", "dark", "phone", "print"])
def test_it_looks_right_in(look, three, opened):
    page = opened(three, size=(390, 844) if look == "phone" else (1280, 900), dark=look in ("dark", "print"))
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")  # nothing sticks out
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    if look in ("light", "dark"):
        page.get_by_label("switch between light and dark").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        page.get_by_label("switch between light and dark").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before
    if look == "print":
        page.pdf(path=ARTIFACTS / "printed.pdf", format="A4")
        shown = page.locator("figure:visible").count()
        assert page.locator("figure canvas").count() >= shown - 2 > 20  # drawn although never seen
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before  # and dark again
    if look == "phone":
        page.locator("#rollouts").scroll_into_view_if_needed()
        page.evaluate("document.body.style.paddingBottom = '100vh'")  # room to scroll, as below a long rollout
        page.locator(".tokens").evaluate("text => text.scrollIntoView({ block: 'start' })")
        readout, text = (page.locator(name).bounding_box() for name in (".token-readout", ".tokens"))
        assert readout["y"] + readout["height"] <= text["y"]
    page.locator("#curves").scroll_into_view_if_needed()


def test_hostile_text_is_shown_as_text(tmp_path, opened):
    run = write_run(
        tmp_path / "<img src=x onerror=alert(1)>", [{"step": step, **dict.fromkeys(HOSTILE, 1.0)} for step in (1, 2)]
    )
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    texts = [*HOSTILE, "x" * 2**20]
    (run / "model").mkdir()
    Tokenizer(WordLevel({text: number for number, text in enumerate(texts)}, texts[0])).save(str(run / "model/tokenizer.json"))
    write_rollouts(run, 1, [rollout(1, range(len(texts)), answer=HOSTILE[0], finish=HOSTILE[2])])
    report.write(ReportSource([run]), run / "report.html")
    page = opened(tmp_path / "%3Cimg src=x onerror=alert(1)%3E" / "report.html")
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator(".tokens .t").first.wait_for()
    shown = page.locator(".tokens").inner_text()
    assert HOSTILE[0] in shown and HOSTILE[2] in shown and HOSTILE[3] in shown
    assert "⟨U+202E⟩" in shown and "␀" in shown and "␛[2J" in shown and "\u202e" not in shown
    assert "(1,048,576 characters)" in shown
    assert page.locator("#parts img").count() == 0 and page.locator("#parts script").count() == 0
    assert HOSTILE[0] in page.locator(".facts").inner_text()
    assert page.evaluate("visible('a\\u{e0041}\\ud800\\u{1f600}')") == "a⟨U+E0041⟩⟨U+D800⟩\U0001f600"


def test_a_long_rollout_and_a_ratio_of_nothing(tmp_path, opened):
    """The token that rejected it stands beyond what is put on the page at first; 0 has no place on a log scale."""
    rows = [{"step": step, "sparse/xi_p05": 0.9, "sparse/xi_min": least} for step, least in ((1, 0.0), (2, 1e-9), (3, 0.5))]
    run = write_run(tmp_path / "run", rows)
    dense = [-0.5] * 7000
    dense[6500] = -30.0
    write_rollouts(run, 1, [rollout(1, [5] * 7000, dense=dense, rejected=True)])
    report.write(ReportSource([run]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    hover(page, "sparse/xi_min", 0.01)
    assert page.locator('figure[data-name="sparse/xi_min"] .step').inner_text() == "step 2"
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator(".t.cause.at").wait_for()
    assert "response token 6501" in page.locator(".token-readout").inner_text()
    text, cause = (page.locator(name).first.bounding_box() for name in (".tokens", ".t.cause"))
    assert text["y"] < cause["y"] < text["y"] + text["height"] - cause["height"]  # the text is scrolled to it
    page.locator("#to-cause").click()
    assert 0 < page.locator(".t.cause").bounding_box()["y"] < 900  # and now the page, too


def test_a_live_run_comes_in_without_losing_the_place(looked_at, tmp_path, opened):
    run = tmp_path / "run"
    shutil.copytree(looked_at / "sparse_rl", run, ignore=shutil.ignore_patterns("rollouts"))
    server = make_server(ReportSource([run]), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        page = opened(f"http://127.0.0.1:{server.server_port}/")
        assert "No rollouts are stored" in page.locator("#rollouts").inner_text()
        shutil.copytree(looked_at / "sparse_rl/rollouts", run / "rollouts")
        page.locator("#pick-step").wait_for()
        page.locator("#rollouts").scroll_into_view_if_needed()
        page.locator(".tokens .t").first.wait_for()
        first = page.locator(".tokens").first.inner_text()
        at = page.evaluate("window.scrollY")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "reward/mean": 0.25}) + "\n")
        page.wait_for_function("() => data.runs[0].steps.includes(3)")
        assert page.locator(".tokens").first.inner_text() == first
        assert abs(page.evaluate("window.scrollY") - at) < 200
        assert "watching" in page.locator("#live").inner_text()
        page.evaluate("window.fetch = async () => new Response('it is gone', { status: 503 })")
        page.wait_for_function("() => document.getElementById('live').textContent.includes('cannot be read: it is gone')")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_long_rollouts_do_not_freeze_the_page(looked_at, tmp_path, opened):
    run = big_run(tmp_path / "run", looked_at / "sparse_rl", steps=20, rollouts=10, tokens=4000, layers=4)
    report.write(ReportSource([run]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator(".tokens .t").first.wait_for()
    started = time.monotonic()
    for place in (1, 2, 3):
        page.locator(".rollout-row").nth(place).click()
        assert page.locator(".tokens .t").count() == 4020
    page.locator(".rollout-row").nth(0).click()
    for k in range(0, 4000, 500):
        page.locator("#time").evaluate("(slider, k) => { slider.value = k; slider.dispatchEvent(new Event('input')); }", k)
        page.wait_for_function(
            "k => document.getElementById('held').textContent.startsWith(`response token ${k + 1}:`)", arg=k
        )
    assert time.monotonic() - started < 60  # a dozen answers, on a machine that may be very busy; a frozen page takes minutes
