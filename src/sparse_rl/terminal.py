"""The console that every command prints on. Text from outside cannot reach a terminal as a command."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from .text import printable


class Terminal(Console):
    """A rich console that shows control characters in column names, prompts, errors of rewards and folder names as escapes.

    Rich adds its own colours later.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if not segment.control and not text.isprintable():
                segment = Segment(printable(text, most=len(text), keep="\n\t"), segment.style)
            yield segment
