"""`sparse-rl report`: write or serve an HTML report about runs."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser)
    parser.description = (
        "Write a self-contained HTML report of run folders: summary, alerts, all curves, rollouts token by token, and "
        "cache contents. Runs that differ only in the seed are drawn as one line with a band."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder that contains run folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file [report.html in the first RUN]")
    parser.add_argument("--serve", action="store_true", help="serve a live report on this machine for a browser")
    parser.add_argument("--port", type=int, default=8642, metavar="N", help="port of --serve; 0 picks a free port [8642]")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="folder to write the main plots to, as SVG and PNG")


def run(args: argparse.Namespace) -> None:
    from ..report.write import write_report

    write_report(args)
