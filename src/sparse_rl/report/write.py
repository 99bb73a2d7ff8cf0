"""`sparse-rl report`: write a page from run folders, once or while they grow, and figures for papers."""

import argparse
from pathlib import Path

from ..errors import UserError
from ..text import printable
from ..train.run_folder import RunFolder
from ..train.storage import is_address
from . import page
from .document import ReportSource

SERVED_BYTES = 2**30
"""Compressed bytes of rollouts that a server holds in memory; a browser does not download them all."""


def write_report(args: argparse.Namespace) -> None:
    runs = [local(run, args) for run in args.runs]
    source = ReportSource(runs)
    if args.figures:
        from .figures import write_figures

        for file in write_figures(source, args.figures):
            print(printable(str(file)))
    if args.serve:
        if args.out:
            raise UserError("--serve writes no file: leave --out or --serve out.")
        from .serve import serve

        serve(ReportSource(runs, budget_bytes=SERVED_BYTES), args.port)
    elif args.out or not args.figures:
        file = args.out or default_file(runs)
        document = page.write(source, file)
        for line in headline_lines(document):
            print(line)
        print(f"The report is in {printable(str(file))} ({file.stat().st_size / 2**20:.1f} MiB): open it in a browser.")


def local(run: str, args: argparse.Namespace) -> Path:
    """Return the folder to read; for a run on shared storage, a current local copy."""
    if not is_address(run):
        RunFolder(run, writes=False).recover_if_abandoned()
        return Path(run)
    if args.serve or not (args.out or args.figures):
        raise UserError(f"{run} is not on this machine: name a file for the page with --out, or a folder with --figures.")
    folder = RunFolder(run)
    folder.stored_config()
    folder.pull()
    return folder.path


def default_file(runs: list[Path]) -> Path:
    """Return the default file, in the folder that was named first."""
    return runs[0] / page.FILE


def headline_lines(document: dict) -> list[str]:
    """Return lines for a terminal: each run in a line or two, and what is missing."""
    lines = [*document["notes"]]
    for run in document["runs"]:
        lines.append(f"{run['name']}: {run['sentences'][0]}")
        lines += [f"  {note}" for note in run["notes"]]
    return [printable(line, 2000) for line in lines]
