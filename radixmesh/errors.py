"""What the command reports to its user in one line."""


class CommandError(Exception):
    """The world is not as the command needs it: exit code 1. The message says what is wrong and whose move is next."""

    exit_code = 1


class UsageError(CommandError):
    """The command was called with something it does not take: exit code 2."""

    exit_code = 2
