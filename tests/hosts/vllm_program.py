"""A trainer beside real engines of vLLM: what these say of weights that they have loaded, and behind updates.

    vllm_program.py FOLDER TENSOR_PARALLEL tied|untied|mla|biased SEED OTHER_SEED

The engine loads the weights of a folder. It gets others, all at once, and then in two parts those that it had. Of what
is packed behind a load nothing can be read, so words and their probabilities are compared, to the bit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from remesh.integrations.vllm import RemeshTrainerInitInfo, ShardedModule
from remesh.integrations.vllm_plugin import register
from remesh.wire.free_ports import free_port

CHANGED = ("model.embed_tokens.", "model.layers.0.self_attn.", "model.layers.1.mlp.", "model.norm.")
"""Beginnings of the names that the second update brings, and the third does not."""


class Client:
    """vLLM's calls, in the process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        self.engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    def finish_weight_update(self) -> None:
        self.engine.finish_weight_update()


def _model(seed: int, kind: str) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 130, "hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 128}
    common = {**sizes, "num_hidden_layers": 2, "num_attention_heads": 4, "dtype": "float32"}
    if kind == "mla":  # as DeepSeek's, of dense layers alone, since experts on a CPU are packed at the first load
        ranks = {"q_lora_rank": 96, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        dense = {"v_head_dim": 128, "first_k_dense_replace": 2, "num_key_value_heads": 4, "n_routed_experts": 8}
        return DeepseekV3ForCausalLM(DeepseekV3Config(**common, **ranks, **dense))
    if kind == "biased":
        return Qwen2ForCausalLM(Qwen2Config(**common, num_key_value_heads=2))
    return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=2, tie_word_embeddings=kind == "tied"))


def _words(engine: Any) -> list[Any]:
    """Tokens that follow on some, and the probabilities of the likeliest."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=4, detokenize=False)
    prompts = [{"prompt_token_ids": [1, 5, 9, 20]}, {"prompt_token_ids": [129, 3]}]
    said = [output for answer in engine.generate(prompts, params) for output in answer.outputs]
    return [
        [list(one.token_ids), [sorted((key, value.logprob) for key, value in each.items()) for each in one.logprobs]]
        for one in said
    ]


def main(folder: str, tensor_parallel: str, kind: str, *seeds: str) -> None:
    loaded, trained = (_model(int(seed), kind) for seed in seeds)
    loaded.save_pretrained(folder)
    register()
    engine = LLM(
        folder,
        tensor_parallel_size=int(tensor_parallel),
        weight_transfer_config=WeightTransferConfig(backend="remesh"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        disable_log_stats=True,
        max_model_len=64,
        max_num_seqs=4,
    )
    words = [_words(engine)]
    info = RemeshTrainerInitInfo("127.0.0.1", free_port(), 1, int(tensor_parallel), rank=0, timeout_s=120)
    source = ShardedModule(trained)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(engine), source=source)
    names = {name for name, _ in trained.named_parameters()}
    changed = {name for name in names if name.startswith(CHANGED)}
    trainer.send_weights()
    words.append(_words(engine))
    trained.load_state_dict(loaded.state_dict())
    for part in (changed, names - changed):
        source.only = part
        trainer.send_weights()
        words.append(_words(engine))
    trainer.shutdown()
    print("told", json.dumps(words), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).mkdir()
    main(*sys.argv[1:])
