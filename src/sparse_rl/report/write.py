"""`sparse-rl report`: write the HTML report of run folders, serve it live, or write its figures."""

import argparse
from pathlib import Path

from ..errors import UserError
from ..text import printable
from ..train.run_folder import RunFolder
from ..train.storage import is_address
from . import page
from .document import ReportSource

SERVED_BYTES = 2**30
"""Maximum compressed bytes of rollouts that the server holds in memory. A browser requests them step by step."""


def write_report(args: argparse.Namespace) -> None:
    runs = [local(run, args) for run in args.runs]
    source = ReportSource(runs)
    if args.figures:
        from .figures import write_figures

        for file in write_figures(source, args.figures):
            print(printable(str(file)))
    if args.serve:
        if args.out:
            raise UserError("--serve writes no file: omit --out or --serve.")
        from .serve import serve

        serve(ReportSource(runs, budget_bytes=SERVED_BYTES), args.port)
    elif args.out or not args.figures:
        file = args.out or runs[0] / page.FILE
        document = page.write(source, file)
        for line in headline_lines(document):
            print(line)
        print(f"The report is in {printable(str(file))} ({file.stat().st_size / 2**20:.1f} MiB): open it in a browser.")


def local(run: str, args: argparse.Namespace) -> Path:
    """Return the local folder of a run. For a run on shared storage, copy it to a local folder first."""
    if not is_address(run):
        RunFolder(run, writes=False).recover_if_abandoned()
        return Path(run)
    if args.serve or not (args.out or args.figures):
        raise UserError(f"{run} is on remote storage: pass a local file with --out, or a local folder with --figures.")
    folder = RunFolder(run)
    folder.stored_config()
    folder.pull()
    return folder.path


def headline_lines(document: dict) -> list[str]:
    """Return the lines to print: general notes, then for each run its verdict and its notes."""
    lines = [*document["notes"]]
    for run in document["runs"]:
        lines.append(f"{run['name']}: {run['sentences'][0]}")
        lines += [f"  {note}" for note in run["notes"]]
    return [printable(line, 2000) for line in lines]
