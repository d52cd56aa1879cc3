"""The one error of everything here: an input file that this job can never use."""

from __future__ import annotations


class BadInput(Exception):
    """What is wrong with a file and what would be allowed; whoever knows the job's field puts it in front.

    Neither text holds the URI: it may carry a signature.
    """

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message, allowed)
        self.message, self.allowed = message, allowed
