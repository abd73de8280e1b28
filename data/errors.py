"""The one error of this package that a user can mend: wrong settings, unreadable text, missing or damaged files."""


class DataError(ValueError):
    """What came, what was needed and which knob or command mends it; command lines print it without a trace."""
