"""Where vLLM runs, as its sources publish it: here as on a GPU."""

from __future__ import annotations


class Platform:
    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True


current_platform = Platform()
