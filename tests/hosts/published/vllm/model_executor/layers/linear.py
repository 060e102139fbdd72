"""The method of plain matrices, as vLLM's sources publish it."""

from __future__ import annotations

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class UnquantizedLinearMethod(QuantizeMethodBase):
    pass
