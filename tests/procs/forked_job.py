"""A job on this machine whose processes are forked of one that has torch already: each starts seconds sooner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from remesh.testbed.local_job import LocalJob
from tests.procs.forked_programs import ForkedProgram, module_of, start


class ForkedJob(LocalJob):
    """What an agent looks like from outside is a forked Python."""

    forks_workers = True
    """Whether agents have their workers forked too; otherwise each is started in a fresh Python, as agents do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for agent in self.agents.values():
                assert isinstance(agent, ForkedProgram)
                agent.end_with_stacks()
            error.add_note(self.describe_logs(num_lines=400))
        super().__exit__(kind, error, trace)

    def start_agent(self, command: Sequence[str], path: Path) -> Any:
        path.touch()
        _, _, module, *words = command  # python -m
        return start(["-m", module_of(words) if self.forks_workers else module, *words], Path.cwd(), {}, path, path)
