"""What a user did wrong, in one sentence with the remedy. The command line prints it and exits with 2."""


class UserError(ValueError):
    """A mistake the user can mend: the message is one sentence and says how."""
