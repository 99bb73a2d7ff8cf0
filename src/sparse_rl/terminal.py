"""Console and tables of every command. Control characters in external text are escaped."""

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from .text import printable

PLAIN_WIDTH = 140
"""Width of tables in columns if the output is not a terminal."""


class Terminal(Console):
    """A rich console that escapes control characters in column names, prompts, reward errors and folder names.

    Rich adds its own colour codes afterwards.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if not segment.control and not text.isprintable():
                segment = Segment(printable(text, most=len(text), keep="\n\t"), segment.style)
            yield segment

    def print_line(self, text: str, style: str = "", end: str = "\n") -> None:
        """Print a text as it is: without markup, and without breaks in long lines."""
        self.print(Text(text, style), soft_wrap=True, end=end)


def wide_console(width: int = PLAIN_WIDTH) -> Terminal:
    """Return a console whose tables have `width` columns if the output is not a terminal."""
    console = Terminal(highlight=False)
    return console if console.is_terminal else Terminal(highlight=False, width=width)


def titled_table(title: str, headings: Sequence[str], left: Collection[str] = ()) -> Table:
    """Return an empty table. Its first column and those in `left` are left-aligned, the others right-aligned."""
    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place and heading not in left else "left")
    return table
