"""Console used by every command. Escapes control characters in external text, so that the text cannot control the terminal."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from .text import printable


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
