"""Log of a job: each event a line in its folder, and in `logging` what its user should see at once."""

from __future__ import annotations

import logging

from remesh.carried.rounds.job_folder import JobFolder

logger = logging.getLogger(__name__)


class Journal:
    """The log of one job."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    def note(self, text: str) -> None:
        """Log a line as an event; a disk that has no room for it must not end the job."""
        try:
            self._folder.log_event(text)
        except OSError as error:
            logger.warning("writing %s: %s; the line was: %s", self._folder.logs / "events.log", error.strerror, text)

    def warn(self, text: str) -> None:
        """Show the user a line."""
        logger.warning("%s", text)
