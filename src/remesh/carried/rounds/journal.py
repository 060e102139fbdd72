"""Where does a leader tell what happens? To its user in lines, and in the job's log of events."""

from __future__ import annotations

from collections.abc import Callable

from remesh.carried.rounds.job_folder import JobFolder


class Journal:
    """Both places in which the story of a job is told."""

    def __init__(self, folder: JobFolder, say: Callable[[str], None]) -> None:
        """``say`` takes lines for the user."""
        self._folder = folder
        self.say = say

    def note(self, text: str) -> None:
        """Log a line as an event; a disk that has no room for it must not end the job."""
        try:
            self._folder.log_event(text)
        except OSError as error:
            self.say(f"writing {self._folder.logs / 'events.log'}: {error.strerror}; it would say: {text}")
