"""How long the report of a large run takes to write and to open, in headless Chromium, of three each the median:
python benchmarks/report.py --like runs/quickstart/sparse_rl --out benchmarks/results/report.json

The folders are made up in the formats of a real run (`--like`), evictions and log-probs random: the worst case for gzip.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from sparse_rl.report import page
from sparse_rl.report.document import ReportSource

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from report_runs import big_run
from test_report_browser import CHROMIUM

CASES = {
    "1,000 steps, 5,000 rollouts of 400 tokens": {"steps": 1000, "rollouts": 5, "tokens": 400, "layers": 24},
    "100 steps, 1,000 rollouts of 4,000 tokens": {"steps": 100, "rollouts": 10, "tokens": 4000, "layers": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--like", type=Path, required=True, help="a real run of which metrics and configuration are taken")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        cases = {}
        for number, (name, shape) in enumerate(CASES.items()):
            run = big_run(Path(folder) / str(number), args.like, **shape)
            cases[name] = shape | {"kv_heads": 2} | write(run) | opened(browser, run / page.FILE)
            print(name, cases[name], flush=True)
        record = {
            "date": datetime.date.today().isoformat(),
            "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
            "versions": {"chromium": browser.version, **{name: version(name) for name in ("pyarrow", "numpy")}},
            "cases": cases,
        }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


def write(run: Path) -> dict[str, float]:
    started = time.perf_counter()
    page.write(ReportSource([run]), run / page.FILE)
    return {
        "write_s": round(time.perf_counter() - started, 2),
        "file_mib": round((run / page.FILE).stat().st_size / 2**20, 1),
    }


def opened(browser: Browser, file: Path) -> dict[str, float]:
    """Seconds to the first paint, until the file is loaded, and from asking for the rollouts to reading one."""
    seen: dict[str, list[float]] = {"first_paint_s": [], "load_s": [], "rollout_s": []}
    for _ in range(3):
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        started = time.perf_counter()
        tab.goto(f"file://{file}")
        seen["load_s"].append(time.perf_counter() - started)
        seen["first_paint_s"].append(tab.evaluate("performance.getEntriesByType('paint')[0].startTime") / 1000)
        started = time.perf_counter()
        tab.evaluate("document.querySelector('#rollouts').scrollIntoView()")
        tab.wait_for_selector(".tokens .t")
        seen["rollout_s"].append(time.perf_counter() - started)
        tab.close()
    return {name: round(statistics.median(values), 2) for name, values in seen.items()}


if __name__ == "__main__":
    main()
