"""What the plan needs to know of a model, read without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swiftfp8.tasks import Head


@dataclass(frozen=True, kw_only=True)
class LinearMeta:
    """One matmul with a weight. `name` is the module path; `layer` its decoder layer, if any.

    `kind`: "linear", "head" (the output projection), "router" (a gate, or any subclass of
    nn.Linear), or "experts" (a 3-D parameter [experts, out, in], of which `count` experts take part
    in a token). Other tasks than language modelling know "score" (their own new head), "pooler"
    (what an encoder's score reads) and "unused".
    """

    name: str
    in_features: int
    out_features: int
    bias: bool
    kind: str
    layer: int | None
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelMeta:
    """Shapes and counts of a causal language model whose files lie in `path`.

    `keep_high` maps name patterns (shell globs on full module names) to the family's reason for
    keeping them out of FP8. `learned_positions`: a table holds one vector for each of the
    `max_position_embeddings` positions, and none for more. Parameter counts are numbers of
    elements. `unfused_loss` is why head and loss can't be computed together in chunks, None where
    nothing in the model's structure speaks against it. `qk_norm`: attention normalizes q and k.
    `unfused_layers` is why its decoder layers don't have the form that the torch backend fuses.
    `head` and the names of its modules are those of `task=seq_cls` and `reward`; `encoder`: every
    token sees all others.
    """

    name: str
    family: str
    path: Path
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tied_head: bool
    linears: tuple[LinearMeta, ...]
    total_params: int
    keep_high: dict[str, str]
    learned_positions: bool = False
    unfused_loss: str | None = None
    unfused_layers: str | None = None
    qk_norm: bool = False
    head: Head | None = None
    head_modules: tuple[str, ...] = ()
    encoder: bool = False
