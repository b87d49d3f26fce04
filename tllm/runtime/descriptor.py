"""What a tap reads: its descriptor, and the operations of steering."""

from __future__ import annotations

from enum import IntEnum

from tllm.runtime.columns import STAGES, Column

#: Bump when an op, the descriptor, the plan, or what is fused changes: it is part of vLLM's
#: compile-cache key.
LAYOUT_VERSION = 12


class Descriptor(IntEnum):
    """Fields of one tap's descriptor, int64 each. Addresses are device addresses."""

    FLAGS = 0
    """Flags of the columns that the first stage looks at, and those of the second shifted by
    `FLAG_BITS`. A descriptor without flags returns before anything is read."""
    ARENA = 1
    """Address of the ring, `[arena_rows, hidden]` in the model's dtype."""
    VECTORS = 2
    """Address of the steering vectors, `[vectors, hidden]` in the model's dtype."""
    OPERATIONS = 3
    """Address of the operations after the one in each entry, `Operation.SIZE` words each."""
    STAGE = 4
    """Where the fields of the stages begin: those of the columns (`Column.fields`) in turn, each
    as `STAGES` words side by side."""


STAGE_FIELDS = tuple(name for column in Column for name in column.fields)
DESCRIPTOR_WIDTH = 32

assert Descriptor.STAGE + STAGES * len(STAGE_FIELDS) <= DESCRIPTOR_WIDTH


def stage_field(name: str) -> int:
    """Which word of a descriptor a field of the first stage is; that of the second is the next."""
    return Descriptor.STAGE + STAGES * STAGE_FIELDS.index(name)


class OperationKind(IntEnum):
    """Which formula an operation computes. `g` is the strength of its gate (1 without), `v` its
    vector, `b1`, `b2`, ... this and those that follow it in memory."""

    ALONG = 0
    """`h' = h + g (ADD + NORM |h| + COMPONENT p + STRENGTH (clip(p, LOW, HIGH) - p)) v`, with
    `p = h . v`."""
    ROTATE = 1
    """`h' = h + g STRENGTH ((r ADD - p1) b1 + (r NORM - p2) b2)`, with `pi = h . bi` and
    `r = |(p1, p2)|`; where `COMPONENT` is not 0, only of rows with `p1 > 0`."""
    DIMENSIONS = 2
    """`h' = h + g STRENGTH (b1 h + b2)` dimension by dimension, without `b2` where `COMPONENT` (how
    many vectors there are) is 1, and where it is 4 only of numbers from `b3` to `b4`."""
    FEATURES = 3
    """`h' = h + g STRENGTH sum(a_i(h . b(2i - 1)) b(2i))`, each `a_i` as a `FeatureWord` record
    says. They lie among the operations, the first of them where the integer in `LOW` says, and
    are as many as that in `HIGH`."""
    GRADIENT = 4
    """`h' = h + g STRENGTH grad f(h)`, as `Gradient` says, of an MLP with `LOW` units in its first
    hidden layer and `HIGH` in its second."""


class Operation(IntEnum):
    """Words of one steering operation, 32 bits each, the coefficients float32; what is computed
    with them `OperationKind` says."""

    CHAIN = 0
    """In an entry: how many operations follow the sum, `HAS_SUM` if there is a sum, and
    `CHAIN_UNIT` times the index of the second operation. Unused in the others, which lie one after
    the other."""
    VECTOR = 1
    ADD = 2
    NORM = 3
    COMPONENT = 4
    STRENGTH = 5
    LOW = 6
    HIGH = 7
    COEFFICIENTS_END = 8
    GATE = 9
    """1 and the number of the gate that decides, 0 for none; `SCOPE_UNIT` times its scope, by
    `SCOPES`; and `KIND_UNIT` times the kind. Words from here on are free: an operation of 16 words
    begins where 64 bytes do."""
    SIZE = 16


class FeatureWord(IntEnum):
    """Words of one feature, in a record as long as an operation's, float32.

    With `s` the product and `BIAS` added, `f = s` where `s > THRESHOLD`, else 0, it computes
    `SLOPE f + clip(f, LOW, HIGH) - f`, or 0 where `ONLY_ACTIVE` is not 0 and `s <= THRESHOLD`.
    """

    BIAS = 0
    THRESHOLD = 1
    SLOPE = 2
    LOW = 3
    HIGH = 4
    ONLY_ACTIVE = 5
    END = 6


KIND_UNIT = 256
"""No gate has this number."""


class Replacement(IntEnum):
    """Words of one replacement, 32 bits each; addresses take two, coefficients are float32.

    With `s` the source it computes, where the mask says so, `h' = KEEP h + SCALE s`.
    """

    SOURCE = 0
    """Address of a row `[hidden]` in the model's dtype; 0 for a row of zeros."""
    MASK = 2
    """Address of a row `[hidden]` in the model's dtype, 0 at dimensions that stay as they are; the
    address is 0 where all change."""
    KEEP = 4
    SCALE = 5
    COUNT = 6
    """In the first of a patch row at a point: how many there are; they lie one after the other."""
    SIZE = 8


class GateWord(IntEnum):
    """Words of one record of a gate, 32 bits each; an address takes two, and what is not counted is
    float32.

    With `p` the vector and `s` the score, `p . h + BIAS` or what `SCORE` says in the place of the
    product, the strength is 1 where `LOW < s < HIGH` and else 0; or, where `SOFT` is not 0,
    `sigmoid(SOFT (s - MIDDLE))`. A record without a vector joins others: the least of their
    strengths, or the greatest. A small MLP is a record for each unit, layer after layer, and one
    for its score.
    """

    VECTOR = 0
    """Address of a row `[hidden]` of float32, or of the weight of a unit of a small MLP; 0 for a
    joint of others."""
    NUMBER = 2
    """Where in a token's state strength and score go. Of a unit: which of its layer it is."""
    COUNT = 3
    """In the first of a steering row at a point: how many there are; they lie one after the
    other."""
    SCORE = 4
    """What stands in the place of the product: the index in `KINDS`, `READS_ROW` or
    `READS_UNITS`."""
    TERMS = 5
    """Of a joint: a bit for each gate that it joins."""
    EVERY = 6
    """Of a joint: whether all must hold. Of a unit of a small MLP: whether a layer begins
    with it."""
    BIAS = 7
    LOW = 8
    HIGH = 9
    SOFT = 10
    MIDDLE = 11
    SCOPE = 12
    """Whether it is remembered where the strength is above one half, and how: the index in
    `SCOPES`. `SUMMED`: nothing is judged, but rows are added up."""
    THRESHOLD = 13
    """Of the feature of an autoencoder: where `s` is not above it, it is 0."""
    BETWEEN = 14
    """Of a unit of a small MLP: what stands behind its layer, by the order of `BETWEEN`, from 1 on;
    0 for the last layer, which gives the score of the probe."""
    SIZE = 16


HAS_SUM = 256
"""No steering row has this many operations at one point: a request has up to 64 there, and may have
as many that controllers decided."""
CHAIN_UNIT = 512
SCOPE_UNIT = 64
