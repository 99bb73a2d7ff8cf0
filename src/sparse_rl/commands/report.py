"""`sparse-rl report`: write or serve an HTML report about runs."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser)
    parser.description = (
        "Write one HTML file that needs no network from run folders: the outcome in words, alerts, every curve, rollouts token by "
        "token and what the cache held. Runs that differ only in the seed are drawn as one line with a band."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder that holds runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write [report.html in the first RUN]")
    parser.add_argument("--serve", action="store_true", help="watch a live run in a browser, on this machine only")
    parser.add_argument("--port", type=int, default=8642, metavar="N", help="port of --serve; 0 picks a free one [8642]")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write the main plots there as SVG and PNG")


def run(args: argparse.Namespace) -> None:
    from ..report.write import write_report

    write_report(args)
