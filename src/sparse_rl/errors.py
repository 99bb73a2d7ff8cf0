"""What a user should know: mistakes in one sentence with the remedy, and what runs otherwise than expected, said once."""

import functools
import sys


class UserError(ValueError):
    """A mistake the user can mend: the message is one sentence and says how. The command line prints it and exits with 2."""


@functools.cache
def notice(text: str) -> None:
    """One line on the terminal, once."""
    sys.stderr.write(f"sparse-rl: {text}\n")
