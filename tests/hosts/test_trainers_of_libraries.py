"""Trainers of TRL and of sentence-transformers over ours: stopped, and ended with the bits of the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_WORDS = [f"w{number}" for number in range(40)]
_STOPPED_AT, _NUM_STEPS = 5, 6


def _lines(count: int, seed: int) -> list[str]:
    picked = torch.randint(len(_WORDS), (count, 6), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(_WORDS[at] for at in line) for line in picked]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - a host may be missing
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
    known = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *_WORDS])}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def _options(folder: Path) -> dict[str, Any]:
    options = {"output_dir": str(folder), "max_steps": _NUM_STEPS, "save_strategy": "steps", "save_steps": 2}
    options |= {"per_device_train_batch_size": 4, "learning_rate": 1e-2}
    return options | {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}


def _sft(kind_of: Any, folder: Path) -> Any:
    """TRL's trainer of its quick start, with a Llama and words that need no download."""
    from datasets import Dataset  # noqa: PLC0415 - a host may be missing
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    tokens = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = SFTConfig(**_options(folder), max_length=16, gradient_checkpointing=False)
    data = Dataset.from_dict({"text": _lines(32, seed=1)})
    model = LlamaForCausalLM(config)
    return kind_of(SFTTrainer)(model=model, args=arguments, train_dataset=data, processing_class=tokens)


def _sentences(kind_of: Any, folder: Path) -> Any:
    """The trainer of sentence-transformers' guide, with pairs and their scores."""
    from datasets import Dataset  # noqa: PLC0415 - a host may be missing
    from sentence_transformers import (  # noqa: PLC0415
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    tokens, place = _tokenizer(), str(folder.with_name("bert"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokens), max_position_embeddings=32, **sizes)).save_pretrained(place)
    tokens.save_pretrained(place)
    model = SentenceTransformer(
        modules=[models.Transformer(place, max_seq_length=16), models.Pooling(16)], device="cpu"
    )
    scores = torch.rand(32, generator=torch.Generator().manual_seed(4)).tolist()
    data = Dataset.from_dict({"sentence1": _lines(32, seed=2), "sentence2": _lines(32, seed=3), "score": scores})
    arguments = SentenceTransformerTrainingArguments(**_options(folder))
    loss = losses.CosineSimilarityLoss(model)
    return kind_of(SentenceTransformerTrainer)(model=model, args=arguments, train_dataset=data, loss=loss)


def _over_ours(kind: type) -> type:
    """As the page says: the library's trainer first, ours last; it stops like a job that is interrupted."""
    from remesh.integrations.transformers import RemeshTrainer  # noqa: PLC0415 - a host may be missing

    return type(kind.__name__, (kind, RemeshTrainer), {})


def _weights(make: Any, kind_of: Any, folder: Path, *, stops: bool = False, resume: bool | None = None) -> Any:
    torch.manual_seed(3)
    trainer = make(kind_of, folder)
    if stops:
        step = trainer.training_step

        def interrupted(*arguments: Any, **more: Any) -> Any:
            if trainer.state.global_step == _STOPPED_AT:
                raise KeyboardInterrupt
            return step(*arguments, **more)

        trainer.training_step = interrupted
    trainer.train(resume_from_checkpoint=resume)
    return {name: one.clone() for name, one in trainer.model.state_dict().items()}


@pytest.mark.parametrize(("package", "make"), [("trl", _sft), ("sentence_transformers", _sentences)])
def test_a_stopped_job_ends_with_the_bits_of_the_librarys_own_that_was_not(
    package: str, make: Any, tmp_path: Path
) -> None:
    pytest.importorskip(package, reason=f"needs {package}, which `make hosts` installs")
    with pytest.raises(KeyboardInterrupt):
        _weights(make, _over_ours, tmp_path / "ours", stops=True)
    assert sorted(path.name for path in (tmp_path / "ours").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    found = _weights(make, _over_ours, tmp_path / "ours", resume=True)
    expected = _weights(make, lambda kind: kind, tmp_path / "theirs")
    assert found.keys() == expected.keys() and len(expected) > 5
    assert not [name for name, one in expected.items() if not found[name].equal(one)]
