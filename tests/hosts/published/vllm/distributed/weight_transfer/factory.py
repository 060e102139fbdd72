"""How vLLM 0.33 finds engines by the name of a backend, as its sources publish it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar


class _Factory:
    _registry: ClassVar[dict[str, Callable[[], Any]]]

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        if isinstance(module_path_or_cls, str):
            if class_name is None:
                raise ValueError("class_name is required when registering with module path")
            cls._registry[name] = lambda: getattr(importlib.import_module(module_path_or_cls), class_name)
        else:
            cls._registry[name] = lambda: module_path_or_cls


class WeightTransferEngineFactory(_Factory):
    _registry: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class WeightTransferTrainerFactory(_Factory):
    _registry: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        return cls._registry[init_info.backend]().trainer_init(init_info=init_info, client=client, source=source)
