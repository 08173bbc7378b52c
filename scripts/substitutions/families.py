"""Families of graphs that are enumerated: variables, operators and the number of operators of a graph.

Each is small enough to be enumerated in seconds. A rule that needs operators of several families follows from theirs
in steps, which is the business of a search.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graph.substitutions.terms import Attribute

Choice = tuple[str, tuple[Attribute, ...]]
"""A kind with its attributes; of a split its dim alone, since it divides where its operand was joined."""


@dataclass(frozen=True)
class Family:
    """Graphs of at most `operators` operators; with `pairs`, also of two outputs and at most that many operators."""

    name: str
    variables: dict[str, str]
    choices: tuple[Choice, ...]
    operators: int
    pairs: int = 0
    degrees: dict[str, int] = field(default_factory=dict)
    everything: bool = False
    """Pair all equal graphs; otherwise each with the smallest ones, from which the others follow in two steps."""
    whole: bool = False
    """Graphs that divide variables, compute, and join results; operands need not be minimal, since such a graph is
    wanted as one rule where it follows from several."""
    about: frozenset[str] = frozenset()
    """Kinds of which a rule must have one; what has none is another family's."""


def _plain(*kinds: str) -> tuple[Choice, ...]:
    return tuple((kind, ()) for kind in kinds)


def _dims(kind: str, *dims: int) -> tuple[Choice, ...]:
    return tuple((kind, (dim,)) for dim in dims)


def _parallel(degree: str, *dims: int) -> tuple[Choice, ...]:
    sided = tuple((kind, (dim, degree)) for kind in ("partition", "combine") for dim in dims)
    return (*sided, ("replicate", (degree,)), ("reduce", (degree,)))


SCALE: tuple[Choice, ...] = (("scale", ("s",)),)
JOINED = (*_dims("concat", 0, 1), *_dims("split", 0, 1))
K = {"k": 2}


def _whole(variables: dict[str, str], operators: int, dims: tuple[int, ...], *choices: Choice) -> Family:
    """Return the family of parallelizations of the operators that are `choices`, on each of `dims`."""
    return Family(
        f"whole parallel {' '.join(' '.join(map(str, (kind, *attributes))) for kind, attributes in choices)}",
        variables,
        (*choices, *_parallel("k", *dims)),
        operators,
        degrees=K,
        everything=True,
        whole=True,
        about=frozenset(kind for kind, _ in choices),
    )


MATRIX = {"x": "a,c", "w": "c,o"}
BIASED = {**MATRIX, "b": "o"}
IMAGE = {"x": "n,c,h,v", "w": "o,c,r,t"}

FAMILIES = (
    *(_whole(MATRIX, 4, (0, 1), choice) for choice in _plain("matmul", "matmul_relu")),
    *(_whole(BIASED, 5, (0, 1), choice) for choice in _plain("linear", "linear_relu")),
    *(_whole(IMAGE, 4, (0, 1), choice) for choice in _plain("conv", "conv_relu")),
    *(_whole({"x": "a,c", "y": "a,c"}, 4, (0, 1), choice) for choice in _plain("add", "multiply")),
    *(
        _whole({"x": "a,c"}, 3, (0, 1), choice)
        for choice in (*_plain("relu", "transpose", "softmax"), *SCALE)
    ),
    _whole({"x": "a,c", "y": "a,e"}, 4, (0,), *_dims("concat", 1)),
    _whole({"x": "a,c", "y": "b,c"}, 4, (1,), *_dims("concat", 0)),
    _whole({"x": "a,c+e"}, 3, (0,), *_dims("split", 1)),
    _whole({"x": "a+b,c"}, 3, (1,), *_dims("split", 0)),
    _whole({"x": "a,b,c"}, 3, (0, 1, 2), *_plain("flatten")),
    _whole({"x": "a.b,c"}, 3, (0, 1), *_plain("unflatten")),
    Family(
        "elementwise",
        {"x": "a,c", "y": "a,c", "z": "a,c"},
        (*_plain("add", "multiply", "relu"), *SCALE),
        3,
    ),
    Family(
        "transpose",
        {"x": "a,c", "y": "a,c"},
        (*_plain("add", "relu", "transpose"), *SCALE),
        3,
        about=frozenset({"transpose"}),
    ),
    Family(
        "products",
        {"x": "a,c", "y": "a,c", "w": "c,o", "v": "c,o", "u": "o,q"},
        (*_plain("matmul", "add", "transpose"), *SCALE),
        3,
        about=frozenset({"matmul"}),
    ),
    Family(
        "concat and split",
        {"x": "a,c", "y": "a,e"},
        (*_plain("add", "relu", "transpose"), *JOINED),
        3,
        about=frozenset({"concat", "split"}),
    ),
    Family("three concatenated", {"x": "a,c", "y": "a,e", "z": "a,g"}, _dims("concat", 0, 1), 3),
    Family(
        "merging linears",
        {"x": "a,c", "y": "b,c", "w": "c,o", "v": "c,p"},
        (*_plain("matmul", "relu"), *JOINED),
        3,
        pairs=3,
        about=frozenset({"matmul"}),
    ),
    Family(
        "sums of products",
        {"x": "a,c", "y": "a,e", "w": "c,o", "v": "e,o"},
        (*_plain("matmul", "add"), *JOINED),
        3,
        about=frozenset({"matmul"}),
    ),
    Family(
        "splitting linears",
        {"x": "a,c", "w": "c,o+p"},
        (*_plain("matmul"), *_dims("concat", 1), *_dims("split", 1)),
        4,
        about=frozenset({"matmul"}),
    ),
    Family(
        "activations",
        {"x": "a,c", "w": "c,o", "b": "o", "y": "a,o"},
        _plain("matmul", "matmul_relu", "linear", "linear_relu", "add_bias", "relu", "add"),
        3,
        about=frozenset({"matmul_relu", "linear", "linear_relu", "add_bias"}),
    ),
    Family(
        "reshape",
        {"x": "a,b,c", "y": "a,b,c", "z": "a.b,c", "w": "c,o"},
        (*_plain("flatten", "unflatten", "matmul", "relu", "add", "multiply"), *SCALE, *_dims("concat", 0)),
        3,
        about=frozenset({"flatten", "unflatten"}),
    ),
    Family(
        "parallel matmul",
        {"x": "a,c", "w": "c,o"},
        (*_plain("matmul"), *_parallel("k", 0, 1)),
        4,
        everything=True,
        degrees=K,
    ),
    Family(
        "parallel linear",
        {"x": "a,c", "w": "c,o", "b": "o"},
        (*_plain("linear", "matmul", "add_bias"), *_parallel("k", 0, 1)),
        4,
        degrees=K,
        about=frozenset({"linear", "add_bias"}),
    ),
    Family(
        "parallel linear with activation",
        {"x": "a,c", "w": "c,o", "b": "o"},
        (*_plain("linear_relu"), *_parallel("k", 0, 1)),
        5,
        degrees=K,
        about=frozenset({"linear_relu"}),
    ),
    Family(
        "parallel matmul with activation",
        {"x": "a,c", "w": "c,o"},
        (*_plain("matmul_relu"), *_parallel("k", 0, 1)),
        4,
        degrees=K,
        about=frozenset({"matmul_relu"}),
    ),
    *(
        Family(
            f"parallel concat and split of dim {dim}",
            {"x": "a,c", "y": second},
            (*_dims("concat", dim), *_dims("split", dim), *_parallel("k", 1 - dim)),
            3,
            degrees=K,
            about=frozenset({"concat", "split"}),
        )
        for dim, second in ((0, "b,c"), (1, "a,e"))
    ),
    Family(
        "parallel reshape",
        {"x": "a,b,c", "y": "a.b,c"},
        (*_plain("flatten", "unflatten"), *_parallel("k", 0, 1, 2)),
        3,
        degrees=K,
        about=frozenset({"flatten", "unflatten"}),
    ),
    Family(
        "two degrees",
        {"x": "a,c", "y": "a,c@k@m"},
        (*_parallel("k", 0, 1), *_parallel("m", 0, 1)),
        3,
        degrees={"k": 2, "m": 3},
    ),
    Family(
        "convolutions",
        {"x": "n,c,h,v", "w": "o,c,r,t", "u": "p,c,r,t"},
        (*_plain("conv"), *_dims("concat", 0, 1), *_dims("split", 1)),
        3,
        pairs=3,
        about=frozenset({"conv"}),
    ),
    Family(
        "sums of convolutions",
        {"x": "n,c,h,v", "y": "n,c,h,v", "w": "o,c,r,t", "u": "o,c,r,t"},
        (*_plain("conv", "conv_relu", "relu", "add"), *SCALE),
        2,
        about=frozenset({"conv", "conv_relu"}),
    ),
    Family(
        "distributing convolutions",
        {"x": "n,c,h,v", "y": "n,c,h,v", "w": "o,c,r,t", "u": "o,c,r,t"},
        (*_plain("conv", "add"), ("concat", (1,))),
        3,
        about=frozenset({"conv"}),
    ),
    Family(
        "parallel elementwise",
        {"x": "a,c@k", "y": "a,c@k", "z": "a,c"},
        (*_plain("relu", "transpose"), *SCALE, *_parallel("k", 0, 1)),
        2,
        degrees=K,
    ),
    Family(
        "parallel sums",
        {"x": "a,c@k", "y": "a,c@k"},
        (*_plain("add", "multiply"), *_parallel("k", 0)),
        3,
        degrees=K,
        about=frozenset({"add", "multiply"}),
    ),
)

COMPOSED: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "linear(x, w, b) ; linear(x, v, d)",
        "split[1,0,o](linear(x, concat[1](w, v), concat[0](b, d))) ; "
        "split[1,1,o](linear(x, concat[1](w, v), concat[0](b, d)))",
        {"x": "a,c", "w": "c,o", "v": "c,p", "b": "o", "d": "p"},
    ),
    (
        "add_along[1](conv(x, w), b) ; add_along[1](conv(x, u), d)",
        "split[1,0,o](add_along[1](conv(x, concat[0](w, u)), concat[0](b, d))) ; "
        "split[1,1,o](add_along[1](conv(x, concat[0](w, u)), concat[0](b, d)))",
        {"x": "n,c,h,v", "w": "o,c,r,t", "u": "p,c,r,t", "b": "o", "d": "p"},
    ),
    (
        "multiply_along[1](conv(x, w), g)",
        "conv(x, multiply_along[0](w, g))",
        {"x": "n,c,h,v", "w": "o,c,r,t", "g": "o"},
    ),
    (
        "batch_norm(conv(x, w), n, s, g, b)",
        "add_along[1](conv(x, multiply_along[0](w, multiply(s, g))), add(multiply(n, multiply(s, g)), b))",
        {"x": "n,c,h,v", "w": "o,c,r,t", "n": "o", "s": "o", "g": "o", "b": "o"},
    ),
    (
        "batch_norm(add_along[1](conv(x, w), e), n, s, g, b)",
        "add_along[1](conv(x, multiply_along[0](w, multiply(s, g))), add(multiply(add(e, n), multiply(s, g)), b))",
        {"x": "n,c,h,v", "w": "o,c,r,t", "e": "o", "n": "o", "s": "o", "g": "o", "b": "o"},
    ),
    (
        "batch_norm(x, n, s, g, b)",
        "combine[0,k](batch_norm(partition[0,k](x), replicate[k](n), replicate[k](s), replicate[k](g), "
        "replicate[k](b)))",
        {"x": "a,c,h,v", "n": "c", "s": "c", "g": "c", "b": "c"},
    ),
    (
        "batch_norm(x, n, s, g, b)",
        "combine[1,k](batch_norm(partition[1,k](x), partition[0,k](n), partition[0,k](s), partition[0,k](g), "
        "partition[0,k](b)))",
        {"x": "a,c,h,v", "n": "c", "s": "c", "g": "c", "b": "c"},
    ),
)
"""Candidates that are given: source, target, variables. They have more operators than a family can enumerate, and go
the way of all others from there: confirmed, pruned, proven, tested."""
