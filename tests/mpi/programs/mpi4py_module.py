"""Runs one module of mpi4py's own tests and prints the outcome of each, one JSON line for each test and rank.

``python mpi4py_module.py FOLDER MODULE``, on as many ranks as one likes, on a real MPI or on the library.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from typing import Any

_REASON_CHARACTERS = 1500


class Outcomes(unittest.TestResult):
    """Prints each outcome as soon as it is known: a test that never ends must not take the others with it."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: set[str] = set()

    def _say(self, outcome: str, test: unittest.TestCase, reason: str = "") -> None:
        line = json.dumps([test.id(), outcome, reason[-_REASON_CHARACTERS:]])
        os.write(1, f"{line}\n".encode())

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._say("started", test)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._say("passed", test)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._say("failed", test, self._exc_info_to_string(err, test))

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._say("failed", test, self._exc_info_to_string(err, test))

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        # Some tests have thousands of parts: the first that fails tells for all.
        if err is not None and test.id() not in self._failed:
            self._failed.add(test.id())
            self._say("failed", test, self._exc_info_to_string(err, subtest))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._say("skipped", test, reason)

    def addExpectedFailure(self, test: unittest.TestCase, _err: Any) -> None:
        self._say("passed", test)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._say("failed", test, "it was expected to fail")


sys.path.insert(0, sys.argv[1])
unittest.defaultTestLoader.loadTestsFromName(sys.argv[2]).run(Outcomes())
