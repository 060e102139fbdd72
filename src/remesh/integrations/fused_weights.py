"""Mapping of a Hugging Face checkpoint's tensors into the fused and sharded parameters of an inference engine.

Definitions. A *source* is a tensor under its name in the checkpoint, whole. A *target* is a parameter of the engine on
one rank of its tensor parallelism. A `Rule` lists the `SourcePart`s of which a target is made, one after another along
the rows of its matrix; a target of experts is a stack of such matrices. The first rule whose name fits, and whose
sources are all there, holds; a table is a tuple of rules, and users put rules of their own before it.

1. Every target finds its rule; each part becomes a box of its source, and strides in the memory of the target.
2. All boxes in one target make a `Piece` under the name of the source: what `remesh.reshard` and `remesh.Refit` take.
3. Names that no rule maps, on either side, and sizes that do not fit, are reported all at once, before a byte moves.

    sources   q_proj [4 heads]   k_proj [2 heads]   v_proj [2 heads]        rank 1 of 4: two ranks hold one KV head each
    target    qkv_proj of rank 1 = | q head 1 | k head 0 | v head 0 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from remesh.foundation.errors import ConfigError
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece


class Experts(Enum):
    """How the sources of a target keep experts."""

    NONE = "none"
    EACH = "each"
    """A source for each expert, its number at ``{expert}`` in the name."""
    STACKED = "stacked"
    """One source, whose first dim counts the experts."""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """What of one source goes into a target."""

    source: str
    r"""Name, with groups of the rule's pattern as ``\1``."""
    dim: int | None = 0
    """Of a matrix, the dim that tensor parallelism cuts; None: every rank holds all."""
    is_kv: bool = False
    """Whether it is cut by KV heads, of which there may be fewer than ranks."""
    section: tuple[int, int] = (0, 1)
    """``(k, n)``: only the k-th of n equal sections of the source along ``dim``, as gate and up in one tensor, or of a
    dim of their own before it."""
    is_transposed: bool = False
    """Whether the matrix of the target is that of the source transposed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The parts of which a target is made, for targets whose names fit."""

    target: str
    """Pattern of the whole name."""
    parts: tuple[SourcePart, ...]
    """Invariant: one after another they fill the rows of the target's matrix."""
    experts: Experts = Experts.NONE
    is_padded: bool = False
    """Whether the last ranks hold rows that no source has, as vocabularies do; those rows are left alone."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Which part of the model an engine's rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    num_kv_heads: int = 1
    first_expert: int = 0
    """The number of the first expert in the stack that this rank holds."""


def _is_split(fused: str, *names: str, kv: Sequence[str] = ()) -> Rule:
    parts = tuple(SourcePart(rf"\1.{name}.\2", is_kv=name in kv) for name in names)
    return Rule(rf"(.+)\.{fused}\.(weight|bias)", parts)


_EXPERTS = r"\.experts(?:\.routed_experts)?"
"""vLLM keeps experts in a module below since release 0.33."""
VLLM_RULES = (
    _is_split("qkv_proj", "q_proj", "k_proj", "v_proj", kv=("k_proj", "v_proj")),
    _is_split("gate_up_proj", "gate_proj", "up_proj"),
    Rule(r"(.+)\.(o_proj|down_proj)\.weight", (SourcePart(r"\1.\2.weight", dim=1),)),
    Rule(r"(.+)\.(o_proj|down_proj)\.bias", (SourcePart(r"\1.\2.bias", dim=None),)),
    Rule(r"(.*embed_tokens|lm_head)\.weight", (SourcePart(r"\1.weight"),), is_padded=True),
    Rule(r"lm_head\.weight", (SourcePart("model.embed_tokens.weight"),), is_padded=True),
    Rule(
        rf"(.+){_EXPERTS}\.w13_weight",
        (SourcePart(r"\1.experts.{expert}.gate_proj.weight"), SourcePart(r"\1.experts.{expert}.up_proj.weight")),
        Experts.EACH,
    ),
    Rule(rf"(.+){_EXPERTS}\.w2_weight", (SourcePart(r"\1.experts.{expert}.down_proj.weight", dim=1),), Experts.EACH),
    Rule(
        rf"(.+){_EXPERTS}\.w13_weight",
        (SourcePart(r"\1.experts.{expert}.w1.weight"), SourcePart(r"\1.experts.{expert}.w3.weight")),
        Experts.EACH,
    ),
    Rule(rf"(.+){_EXPERTS}\.w2_weight", (SourcePart(r"\1.experts.{expert}.w2.weight", dim=1),), Experts.EACH),
    Rule(
        rf"(.+){_EXPERTS}\.w13_weight",
        (
            SourcePart(r"\1.experts.gate_up_proj", section=(0, 2)),
            SourcePart(r"\1.experts.gate_up_proj", section=(1, 2)),
        ),
        Experts.STACKED,
    ),
    Rule(rf"(.+){_EXPERTS}\.w2_weight", (SourcePart(r"\1.experts.down_proj", dim=1),), Experts.STACKED),
    Rule(r"(.*norm\w*|.+\.gate|.+\.router)\.(weight|bias)", (SourcePart(r"\1.\2", dim=None),)),
)
"""Llama, Qwen 2 and 3, Mistral, Mixtral and their kin, as vLLM keeps them."""
TRANSPOSED_EXPERTS = (
    Rule(
        rf"(.+){_EXPERTS}\.w13_weight",
        (
            SourcePart(r"\1.experts.gate_up_proj", dim=1, section=(0, 2), is_transposed=True),
            SourcePart(r"\1.experts.gate_up_proj", dim=1, section=(1, 2), is_transposed=True),
        ),
        Experts.STACKED,
    ),
    Rule(rf"(.+){_EXPERTS}\.w2_weight", (SourcePart(r"\1.experts.down_proj", is_transposed=True),), Experts.STACKED),
)
"""Rules to be put before the others for models whose stacked experts multiply from the left, such as Llama 4."""
IGNORED = (r".*rotary_emb\.inv_freq",)
"""Sources that engines compute themselves."""


@dataclass(frozen=True, slots=True)
class WantedWeights:
    """What one rank of an engine takes."""

    pieces: Mapping[str, Piece]
    """By name of the source."""
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """``(to, from)`` to be copied behind every move: targets that are made of the same source as another one."""
    made_of: Mapping[str, frozenset[str]]
    """Name of a target -> the names of its sources."""

    def copy_ties(self) -> None:
        """Copy every parameter that a source fills to the other parameters tied to it."""
        with torch.no_grad():
            for to, source in self.copies:
                if not to.is_meta and not source.is_meta:
                    to.copy_(source)


def map_weights(
    targets: Mapping[str, torch.Tensor],
    sources: Mapping[str, Sequence[int]],
    place: EnginePlace,
    rules: Sequence[Rule] = VLLM_RULES,
    ignored: Sequence[str] = IGNORED,
) -> WantedWeights:
    """The pieces of the sources that fill the targets of one rank; ``sources`` has their whole shapes.

    A target on the device ``meta`` has a place and no memory: it counts in all checks, and nothing is copied to it.

    Raises `ConfigError` that lists every name without a rule and every size that does not fit.
    """
    mapping = _Mapping(sources, place, rules)
    for name, tensor in targets.items():
        mapping.add(name, tensor)
    mapping.check(ignored)
    return WantedWeights(mapping.pieces(), mapping.copies, mapping.made_of)


@dataclass
class _Mapping:
    sources: Mapping[str, Sequence[int]]
    place: EnginePlace
    rules: Sequence[Rule]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    made_of: dict[str, frozenset[str]] = field(default_factory=dict)
    found: dict[str, tuple[torch.Tensor, list[Shard]]] = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)
    """Address of a target's memory -> its first name."""
    elsewhere: set[str] = field(default_factory=set)
    """Patterns of sources that other ranks take, such as the experts that those hold."""
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Find the sources of a target."""
        tensor = tensor.detach()
        address = tensor.data_ptr()  # 0 without memory
        if address and address in self.seen:  # a tied parameter under another name
            return
        self.seen[address] = name
        matches = ((rule, re.fullmatch(rule.target, name)) for rule in self.rules)
        fitting = ((rule, match) for rule, match in matches if match is not None and self._has_sources(rule, match))
        rule, match = next(fitting, (None, None))
        if rule is None or match is None:
            self.wrong.append(f"parameter {name!r} of shape {tuple(tensor.shape)}: no rule with sources that are there")
            return
        try:
            self.made_of[name] = self._take(rule, match, tensor)
        except (ValueError, RuntimeError, IndexError) as raised:
            self.wrong.append(f"parameter {name!r} of shape {tuple(tensor.shape)}: {raised}")

    def check(self, ignored: Sequence[str]) -> None:
        """Raise `ConfigError` if anything is left over or does not fit."""
        left = [name for name in self.sources if name not in self.found]
        wrong = self.wrong + [
            f"tensor {name!r} of shape {tuple(self.sources[name])}: no parameter takes it"
            for name in left
            if not any(re.fullmatch(pattern, name) for pattern in (*ignored, *self.elsewhere))
        ]
        if wrong:
            raise ConfigError(
                f"mapping weights onto rank {self.place.tp_rank} of {self.place.tp_size} of an engine: {len(wrong)} "
                "names do not fit, expected none; put rules for them before the table:\n  " + "\n  ".join(wrong)
            )

    def pieces(self) -> dict[str, Piece]:
        """The pieces that were found, by source."""
        return {
            name: Piece(tensor, tuple(self.sources[name]), tuple(shards))
            for name, (tensor, shards) in self.found.items()
        }

    def _has_sources(self, rule: Rule, match: re.Match[str]) -> bool:
        first = str(self.place.first_expert)
        return all(match.expand(part.source).replace("{expert}", first) in self.sources for part in rule.parts)

    def _take(self, rule: Rule, match: re.Match[str], tensor: torch.Tensor) -> frozenset[str]:
        """Note what fills a target; the names of its sources."""
        if not tensor.is_contiguous():
            raise ValueError("its memory is not row-major")
        num_filled, made = 0, []
        each = enumerate(tensor) if rule.experts is Experts.EACH else [(0, tensor)]
        if rule.experts is Experts.EACH:
            names = [re.escape(match.expand(part.source)) for part in rule.parts]
            self.elsewhere.update(name.replace(re.escape("{expert}"), r"\d+") for name in names)
        for number, matrix in each:
            row = 0
            for part in rule.parts:
                name = match.expand(part.source).replace("{expert}", str(self.place.first_expert + number))
                box, view, num_rows = self._part(rule, part, self.sources[name], matrix, row)
                row += num_rows
                num_filled += box.size
                made.append((name, Shard(0, box, int(view.storage_offset() - tensor.storage_offset()), view.stride())))
        if num_filled != tensor.numel() and not rule.is_padded:
            raise ValueError(f"its sources fill {num_filled} of {tensor.numel()} elements")
        for name, shard in made:
            other, shards = self.found.setdefault(name, (tensor, []))
            if other is tensor:
                shards.append(shard)
            elif other.shape == tensor.shape:
                self.copies.append((tensor, other))
            else:
                raise ValueError(f"source {name!r} fills another parameter of shape {tuple(other.shape)}, too")
        return frozenset(name for name, _ in made)

    def _part(
        self, rule: Rule, part: SourcePart, shape: Sequence[int], matrix: torch.Tensor, row: int
    ) -> tuple[Box, torch.Tensor, int]:
        """The box of a source; where it lies in the target, in the dims of the source; how many rows of it that is."""
        stacked = int(rule.experts is Experts.STACKED)
        number, num_sections = part.section
        if num_sections > 1 and len(shape) == matrix.ndim + 1 and shape[stacked] == num_sections:
            # Gate and up lie along a dim of their own: one of them is like a source without that dim.
            whole, inner = replace(part, section=(0, 1)), (*shape[:stacked], *shape[stacked + 1 :])
            box, view, num_rows = self._part(rule, whole, inner, matrix, row)
            corners = [(*at[:stacked], number + end, *at[stacked:]) for end, at in enumerate((box.start, box.stop))]
            return Box(*corners), view.unsqueeze(stacked), num_rows
        if len(shape) != matrix.ndim:
            raise ValueError(f"a source has {len(shape)} dims, expected {matrix.ndim}")
        start, size = [0] * len(shape), list(shape)
        if stacked:
            start[0], size[0] = self.place.first_expert, matrix.shape[0]
        if part.dim is not None:
            dim = part.dim + stacked
            start[dim], size[dim] = self._cut(part, shape[dim], len(matrix) if rule.is_padded else None)
        box = Box.at(tuple(start), tuple(size))
        if not Box.of_shape(tuple(shape)).contains(box):
            raise ValueError(f"{box} lies outside of a source of shape {tuple(shape)}")
        turned = matrix.transpose(-1, -2) if part.is_transposed else matrix
        rows = _row_dim(rule, part, matrix.ndim)
        view = turned.narrow(rows, row, size[rows])
        if tuple(view.shape) != box.shape:
            raise ValueError(f"a source gives {box.shape}, expected {tuple(view.shape)}")
        return box, view, size[rows]

    def _cut(self, part: SourcePart, size: int, padded_rows: int | None) -> tuple[int, int]:
        """Start and length of what this rank holds along the dim that is cut."""
        place, (section, num_sections) = self.place, part.section
        if padded_rows is not None:
            start = min(size, place.tp_rank * padded_rows)
            return start, min(size, start + padded_rows) - start
        if size % num_sections:
            raise ValueError(f"{size} rows are not {num_sections} equal sections")
        extent = size // num_sections
        num_parts = math.gcd(place.num_kv_heads, place.tp_size) if part.is_kv else place.tp_size
        if extent % num_parts or (part.is_kv and num_parts != min(place.num_kv_heads, place.tp_size)):
            raise ValueError(f"{extent} rows cannot be cut for {place.tp_size} ranks")
        length = extent // num_parts
        return section * extent + place.tp_rank * num_parts // place.tp_size * length, length


def _row_dim(rule: Rule, part: SourcePart, num_dims: int) -> int:
    """The dim of a part's source that runs along the rows of the target."""
    return num_dims - 1 if part.is_transposed else int(rule.experts is Experts.STACKED)
