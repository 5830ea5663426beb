"""Experts of a mixture: who computes what. A row is a pair of a token and one of its slots, number t · k + j."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from lastbit import Contract, Rounds, StageRecorder
from lastbit.numerics import (
    FORMATS,
    Enclosure,
    Factor,
    Format,
    Groups,
    Tensor,
    clamp,
    concatenate,
    grouped_dot,
    hull,
    multiply_add,
    remembered,
    stack,
)
from lastbit.references._layer_weights import Kind, OpWeights, Projection

ALL = slice(None)


def rounded(*stages: str) -> Rounds:
    """Round at the given stages to the dtype of the activations."""
    return dict.fromkeys(stages, "x")


def adapter_axes(base: Rounds, middle: Rounds, lora: Rounds) -> Mapping[str, Mapping[str, Rounds]]:
    """Make the axes of linear maps with adapters: which dots are rounded, given their stages."""
    return {
        "base": {"fp32_base": {}, "rounded_base": base},
        "middle": {"rounded_middle": middle, "fp32_middle": {}},
        "lora": {"fp32_lora": {}, "rounded_lora": lora},
    }


def limited(gate: Enclosure, up: Enclosure, limit: float) -> tuple[Enclosure, Enclosure]:
    """Limit the operands of SwiGLU: min(gate, limit), and up clamped to ±limit."""
    return (gate, up) if limit == inf else (clamp(gate, -inf, limit), clamp(up, -limit, limit))


def through_limits(
    gradient: Enclosure, value: Enclosure, low: float, high: float, *, was_rounded: bool = True
) -> Enclosure:
    """Propagate the gradient back through the clamp of a value to [low, high]: zero beyond the limits.

    For NaN it is anything from zero to the whole, and at a limit, too, if the value was rounded after it was compared:
    it may have been beyond. A value that was not passes the whole there, as `torch.clamp` up to torch 2.13.
    """
    if high == inf:
        return gradient
    beyond = (value.hi < low) | (value.lo > high)
    within = (value.lo > low) & (value.hi < high) if was_rounded else (value.lo >= low) & (value.hi <= high)
    inside = gradient.zero_where(beyond)
    return hull(inside, inside.zero_where(~(beyond | within)))


def check_limit(limit: float, fmt: Format, any_tensor: Tensor) -> None:
    """Raise ValueError unless `limit` is positive, and infinite or a number of the format."""
    if isinstance(limit, bool | str):
        raise ValueError(f"swiglu_limit={limit!r} must be a number")
    if not limit > 0 or float(any_tensor.new_tensor(limit, dtype=fmt.dtype, device="cpu")) != limit:
        raise ValueError(f"swiglu_limit={limit} must be positive and a number of {fmt.dtype}; leave it out for none")


@dataclass(frozen=True)
class Weights:
    """A matrix per expert by which rows are multiplied: the same part of each, for several projections one on another.

    Attributes:
        kind: which matrices of the projections.
        rows, columns: the part of each of them.
        transposed: whether rows are multiplied with what this part is transposed.
    """

    projections: tuple[Projection, ...]
    kind: Kind
    rows: slice
    columns: slice
    transposed: bool

    @remembered
    def __call__(self, experts: Tensor) -> Factor:
        parts = [p.matrices(self.kind, experts)[ALL, self.rows, self.columns] for p in self.projections]
        together = parts[0] if len(parts) == 1 else concatenate(*parts, dim=-2)
        return Factor.right(together.transposed if self.transposed else together)


@remembered
def _pairs_by_expert(expert_ids: Tensor, first_expert: int, count: int) -> tuple[Groups, Tensor]:
    """Group the pairs of the experts on this rank, and tell which pairs belong to none of them [T · k, 1]."""
    local = (expert_ids.long() - first_expert).flatten()
    return Groups(local, count), ((local < 0) | (local >= count))[:, None]


@remembered
def _repeated(tokens: Enclosure, slots: int) -> Enclosure:
    """Repeat the row [T, n] of each token for each of its pairs: [T · k, n]."""
    count, width = tokens.shape
    return tokens[:, None].expand(count, slots, width).reshape(count * slots, width)


@dataclass(frozen=True)
class Layer:
    """The facts that all steps of one layer share.

    Attributes:
        slots: per token, k.
        groups: the pairs of each local expert.
        skipped: whether a pair belongs to no expert here, [T · k, 1].
        shards: the slices of the intermediate dimension that are computed apart.
        scaling: of the adapters.
    """

    slots: int
    groups: Groups
    skipped: Tensor
    shards: tuple[slice, ...]
    scaling: float
    contract: Contract
    recorder: StageRecorder

    @classmethod
    def of(
        cls,
        expert_ids: Tensor,
        weights: OpWeights,
        *,
        first_expert: int,
        shards: int,
        scaling: float,
        contract: Contract,
        stage: StageRecorder,
    ) -> Layer:
        """Make the layer with these weights, whose experts have the ids from `first_expert` on.

        Raises:
            ValueError: `shards` does not divide the intermediate dimension, or `scaling` is no finite number of fp32.
        """
        experts, width = weights.sizes
        if shards < 1 or width % shards:
            raise ValueError(f"shards={shards} does not divide {width}, the intermediate dimension")
        if not abs(scaling) <= FORMATS["fp32"].max:
            raise ValueError(f"scaling={scaling} is no number in fp32; it must be finite")
        groups, skipped = _pairs_by_expert(expert_ids, first_expert, experts)
        return cls(
            slots=expert_ids.shape[1],
            groups=groups,
            skipped=skipped,
            shards=tuple(slice(p * width // shards, (p + 1) * width // shards) for p in range(shards)),
            scaling=scaling,
            contract=contract,
            recorder=stage,
        )

    def stage(self, name: str, rows: Enclosure, *, result: bool = False) -> Enclosure:
        """Record rows [T · k, n] as a stage [T, k, n]."""
        pairs, width = rows.shape
        return self.recorder(name, rows.reshape(-1, self.slots, width), result=result).reshape(pairs, width)

    def stages(self, name: str, shards: Sequence[Enclosure]) -> list[Enclosure]:
        """Record the rows of every shard: as one stage [T, k, n, P] if there are several."""
        if len(shards) == 1:
            return [self.stage(name, shards[0])]
        pairs, width = shards[0].shape
        together = self.recorder(name, stack(*shards).reshape(-1, self.slots, width, len(shards)))
        return [together.reshape(pairs, width, len(shards))[..., p] for p in range(len(shards))]

    def pairs(self, tokens: Enclosure) -> Enclosure:
        """Repeat the row of each token [T, n] for each of its pairs; zero where the pair is skipped."""
        return _repeated(tokens, self.slots).zero_where(self.skipped)

    def saved(self, values: Enclosure) -> Enclosure:
        """Flatten a saved [T, k, n] to rows of pairs; zero where the pair is skipped."""
        return values.reshape(-1, values.shape[-1]).zero_where(self.skipped)

    def dot(
        self, rows: Enclosure, projection: Projection, kind: Kind, width: int, *, columns: slice = ALL
    ) -> Enclosure:
        """Multiply each row by part of the columns of the matrix [width, K] of its expert, transposed."""
        weights = Weights((projection,), kind, ALL, columns, transposed=True)
        return grouped_dot(rows, self.groups, weights, width)

    def dot_back(
        self, rows: Enclosure, projections: Sequence[Projection], kind: Kind, width: int, *, part: slice = ALL
    ) -> Enclosure:
        """Multiply each row by part of the rows of the stacked matrices [N, width] of its expert."""
        weights = Weights(tuple(projections), kind, part, ALL, transposed=False)
        return grouped_dot(rows, self.groups, weights, width, len(projections))

    def scaled(self, name: str, products: Sequence[Enclosure]) -> list[Enclosure]:
        """Compute scaling · product, both rounded."""
        return self.stages(f"{name}_scaled", [p * self.scaling for p in self.stages(f"{name}_lora", products)])

    def adapted(self, name: str, bases: Sequence[Enclosure], products: Sequence[Enclosure]) -> list[Enclosure]:
        """Add the adapters of every shard: base + scaling · product."""
        if self.contract.has("rounded_lora"):
            return [b + s for b, s in zip(bases, self.scaled(name, products), strict=True)]
        return [multiply_add(p, self.scaling, b) for b, p in zip(bases, products, strict=True)]

    def by_token(self, shards: Sequence[Enclosure]) -> Enclosure:
        """Put the rows of a token's slots, of every shard, side by side: [T, n, k · P]."""
        width = shards[0].shape[-1]
        return concatenate(*(s.reshape(-1, self.slots, width).transposed for s in shards))

    def gate_or_up(self, name: str, rows: Enclosure, projection: Projection) -> Enclosure:
        """Compute rows · baseᵀ + scaling · (rows · aᵀ) · bᵀ, not yet rounded; rows · baseᵀ without an adapter."""
        base = self.stage(f"{name}_base", self.dot(rows, projection, "base", projection.width))
        if not projection.rank:
            return base
        middle = self.stage(f"{name}_lora_mid", self.dot(rows, projection, "a", projection.rank))
        product = self.dot(middle, projection, "b", projection.width)
        return self.adapted(name, [base], [product])[0]

    def down(self, rows: Enclosure, projection: Projection) -> tuple[list[Enclosure], list[Enclosure]]:
        """Compute each shard's share of the outputs of the experts, and the middle of its adapter if there is one."""
        bases = [self.dot(rows[ALL, s], projection, "base", projection.width, columns=s) for s in self.shards]
        if not projection.rank:
            return self.stages("expert_output", self.stages("down_base", bases)), []
        middles = [self.dot(rows[ALL, s], projection, "a", projection.rank, columns=s) for s in self.shards]
        bases, middles = self.stages("down_base", bases), self.stages("down_lora_mid", middles)
        products = [self.dot(middle, projection, "b", projection.width) for middle in middles]
        return self.stages("expert_output", self.adapted("down", bases, products)), middles
