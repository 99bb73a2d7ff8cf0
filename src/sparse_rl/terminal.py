"""The console that every command prints on: no text from outside reaches a terminal as a command to it."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from .text import printable


class Terminal(Console):
    """A rich console. Column names, prompts, rewards' errors and folders' names may hold control characters: they are shown as
    escapes. Rich adds its own colours later."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if not segment.control and not text.isprintable():
                segment = Segment(printable(text, most=len(text), keep="\n\t"), segment.style)
            yield segment
