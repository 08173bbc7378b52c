"""The packaged rules: executed, forward and backward, proven again, and wrong ones refused."""

from __future__ import annotations

import random

import pytest

from graph.substitutions import rewriting
from graph.substitutions.rules import Rule, load_rules, offered_rules
from graph.substitutions.terms import subterms, type_of
from scripts.substitutions.execution import RandomInputs
from scripts.substitutions.offering import offered
from scripts.substitutions.proofs import prove, reachable
from scripts.substitutions.properties import PROPERTIES
from scripts.substitutions.pruning import Candidate, canonical, read_candidate
from scripts.substitutions.terms import conditions, variables
from tests.quick import seeds
from tests.reference.substitutions import agree

RULES = load_rules()
SLICES = 8


# Sizes of the degrees k and m; whatever the extents are, they divide them.
DEGREES = ((2, 3), (3, 2), (4, 2), (1, 5))


@pytest.mark.parametrize("draw", seeds(1, 4))
@pytest.mark.parametrize("part", range(SLICES))
def test_both_sides_of_every_rule_agree_forward_and_backward(part: int, draw: int) -> None:
    """On integers and on floats, of extents and degrees of two draws a rule."""
    for number, rule in enumerate(RULES[part::SLICES]):
        for place, whole in enumerate((True, False)):
            k, m = DEGREES[(number + place + 2 * draw) % (2 if draw == 0 else len(DEGREES))]
            degrees = {"k": k, "m": m} if "m" in _degrees(rule) else {"k": k}
            seed = number + place + 1000 * draw
            assert agree(rule.source, rule.target, rule.types, degrees, seed, whole=whole), rule


def _degrees(rule: Rule) -> set[object]:
    named = {
        part.attributes[-1]
        for term in (*rule.source, *rule.target)
        for part in subterms(term)
        if part.kind in ("partition", "combine", "replicate", "reduce")
    }
    return named | {degree for type_ in rule.types.values() for degree in type_.degrees}


def test_a_sample_of_rules_is_proven_again_from_the_properties_of_the_file() -> None:
    for rule in random.Random(7).sample(RULES, 25):
        used: set[str] = set()
        for source, target in zip(rule.source, rule.target, strict=True):
            proof = prove(source, target, rule.types)
            assert proof is not None, rule
            used |= set(proof)
        assert sorted(used) == list(rule.properties), rule


def test_rules_name_properties_and_conditions_that_exist() -> None:
    names = {one.name for one in PROPERTIES}
    for rule in RULES:
        assert set(rule.properties) <= names
        assert rule.conditions == conditions((*rule.source, *rule.target), rule.types)
        source, target = set(variables(*rule.source)), set(variables(*rule.target))
        assert source <= target or target <= source or len(rule.source) > 1
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_the_file_offers_the_directions_that_are_derived_from_its_rules() -> None:
    offers: dict[str, list[str]] = {}
    for rule, direction in offered_rules():
        offers.setdefault(rule.name, []).append(direction)
    assert offers == offered([(rule.name, rule.source, rule.target, rule.types) for rule in RULES])


def test_every_property_that_a_proof_used_holds_on_integers() -> None:
    """Instances that proofs reach from the sides of rules, hence on types as they occur in proofs."""
    settings = (RandomInputs({"k": 2, "m": 3}, 21), RandomInputs({"k": 3, "m": 2}, 22))
    tested: dict[str, int] = {}
    for rule in RULES:
        if all(tested.get(name, 0) >= 2 for name in rule.properties):
            continue
        for term in (*rule.source, *rule.target):
            for name, left, right in sorted(reachable(term, rule.types), key=str):
                if tested.get(name, 0) < 2:
                    tested[name] = tested.get(name, 0) + 1
                    assert Candidate((left,), (right,), dict(rule.types)).holds(settings), (name, left, right)
    assert {name for rule in RULES for name in rule.properties} <= set(tested)


NAMED = {
    "merge of linears": (
        *rewriting.RULES["merge-linears"].sides,
        {"x": "a,c", "w": "c,o", "v": "c,p"},
    ),
    "merge of convolutions": (
        *rewriting.RULES["merge-convolutions"].sides,
        {"x": "n,c,h,v", "w": "o,c,r,t", "u": "p,c,r,t"},
    ),
    "merge of linears with bias": (
        "linear(x, w, b) ; linear(x, v, d)",
        "split[1,0,o](linear(x, concat[1](w, v), concat[0](b, d))) ; "
        "split[1,1,o](linear(x, concat[1](w, v), concat[0](b, d)))",
        {"x": "a,c", "w": "c,o", "v": "c,p", "b": "o", "d": "p"},
    ),
    "merge of convolutions with bias": (
        "add_along[1](conv(x, w), b) ; add_along[1](conv(x, u), d)",
        "split[1,0,o](add_along[1](conv(x, concat[0](w, u)), concat[0](b, d))) ; "
        "split[1,1,o](add_along[1](conv(x, concat[0](w, u)), concat[0](b, d)))",
        {"x": "n,c,h,v", "w": "o,c,r,t", "u": "p,c,r,t", "b": "o", "d": "p"},
    ),
    "convolution and batch norm at inference": (
        "batch_norm(conv(x, w), n, s, g, b)",
        "add_along[1](conv(x, multiply_along[0](w, multiply(s, g))), add(multiply(n, multiply(s, g)), b))",
        {"x": "n,c,h,v", "w": "o,c,r,t", "n": "o", "s": "o", "g": "o", "b": "o"},
    ),
    "linear and activation": (
        "relu(linear(x, w, b))",
        "linear_relu(x, w, b)",
        {"x": "a,c", "w": "c,o", "b": "o"},
    ),
    "product over a sum": (
        "matmul(x, add(w, v))",
        "add(matmul(x, w), matmul(x, v))",
        {"x": "a,c", "w": "c,o", "v": "c,o"},
    ),
    "transpose of concat": (
        "transpose(concat[1](x, y))",
        "concat[0](transpose(x), transpose(y))",
        {"x": "a,c", "y": "a,e"},
    ),
    "split linear": (
        "concat[1](matmul(x, split[1,0,o](w)), matmul(x, split[1,1,o](w)))",
        "matmul(x, w)",
        {"x": "a,c", "w": "c,o+p"},
    ),
    "samples": (
        "matmul(x, w)",
        "combine[0,k](matmul(partition[0,k](x), replicate[k](w)))",
        {"x": "a,c", "w": "c,o"},
    ),
    "columns": (
        "matmul(x, w)",
        "combine[1,k](matmul(replicate[k](x), partition[1,k](w)))",
        {"x": "a,c", "w": "c,o"},
    ),
    "inner dims": (
        "matmul(x, w)",
        "reduce[k](matmul(partition[1,k](x), partition[0,k](w)))",
        {"x": "a,c", "w": "c,o"},
    ),
    "Partition-Linear-Combine and Replicate-Linear-Combine": (
        "combine[0,k](matmul(partition[0,k](x), replicate[k](w)))",
        "combine[1,k](matmul(replicate[k](x), partition[1,k](w)))",
        {"x": "a,c", "w": "c,o"},
    ),
    "Partition-Linear-Combine and Linear-Reduce": (
        "combine[0,k](matmul(partition[0,k](x), replicate[k](w)))",
        "reduce[k](matmul(partition[1,k](x), partition[0,k](w)))",
        {"x": "a,c", "w": "c,o"},
    ),
    "Combine and Partition": ("partition[0,k](combine[0,k](x))", "x", {"x": "a,c@k"}),
    "convolution in parallel images": (
        "conv(x, w)",
        "combine[0,k](conv(partition[0,k](x), replicate[k](w)))",
        {"x": "n,c,h,v", "w": "o,c,r,t"},
    ),
    "softmax in parallel rows": (
        "softmax(x)",
        "combine[0,k](softmax(partition[0,k](x)))",
        {"x": "a,c"},
    ),
    "concatenation in parallel samples": (
        "concat[1](x, y)",
        "combine[0,k](concat[1](partition[0,k](x), partition[0,k](y)))",
        {"x": "a,c", "y": "a,e"},
    ),
    "split in parallel samples": (
        "split[1,0,c](x)",
        "combine[0,k](split[1,0,c](partition[0,k](x)))",
        {"x": "a,c+e"},
    ),
    "batch norm in parallel images": (
        "batch_norm(x, n, s, g, b)",
        "combine[0,k](batch_norm(partition[0,k](x), replicate[k](n), replicate[k](s), replicate[k](g), "
        "replicate[k](b)))",
        {"x": "a,c,h,v", "n": "c", "s": "c", "g": "c", "b": "c"},
    ),
    "batch norm in parallel channels": (
        "batch_norm(x, n, s, g, b)",
        "combine[1,k](batch_norm(partition[1,k](x), partition[0,k](n), partition[0,k](s), partition[0,k](g), "
        "partition[0,k](b)))",
        {"x": "a,c,h,v", "n": "c", "s": "c", "g": "c", "b": "c"},
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_rules_known_from_papers_are_in_the_file(name: str) -> None:
    wanted = canonical(read_candidate(*NAMED[name]))
    known = {(rule.source, rule.target) for rule in RULES}
    assert (wanted.source, wanted.target) in known, wanted


MATRICES = {"x": "a,a", "y": "a,a", "w": "a,a", "v": "a,a", "b": "a"}
KERNELS = {"x": "a,a,h,v", "w": "a,a,r,t"}
IMAGES = {**KERNELS, **dict.fromkeys("bgns", "a")}
WRONG = [
    (
        "matmul(x, concat[1](w, v))",
        "matmul(concat[1](x, x), concat[0](w, v))",
        {"x": "a,c", "w": "c,c", "v": "c,c"},
    ),
    ("linear(x, w, b)", "matmul(x, w)", MATRICES),
    ("relu(add(x, y))", "add(relu(x), relu(y))", MATRICES),
    ("relu(matmul(x, w))", "matmul(relu(x), w)", MATRICES),
    ("linear_relu(x, w, b)", "add_bias(matmul_relu(x, w), b)", MATRICES),
    ("matmul(x, w)", "matmul(w, x)", MATRICES),
    ("transpose(matmul(x, w))", "matmul(transpose(x), transpose(w))", MATRICES),
    ("matmul(add(x, y), add(w, v))", "add(matmul(x, w), matmul(y, v))", MATRICES),
    ("linear(add(x, y), w, b)", "add(linear(x, w, b), linear(y, w, b))", MATRICES),
    ("scale[s](multiply(x, y))", "multiply(scale[s](x), scale[s](y))", MATRICES),
    ("scale[s](relu(x))", "relu(x)", MATRICES),
    ("split[0,0,a](concat[0](x, y))", "y", MATRICES),
    ("concat[0](x, y)", "concat[0](y, x)", MATRICES),
    ("reduce[k](replicate[k](x))", "x", MATRICES),
    ("combine[0,k](partition[0,k](x))", "reduce[k](replicate[k](x))", MATRICES),
    ("matmul(x, w)", "reduce[k](matmul(replicate[k](x), replicate[k](w)))", MATRICES),
    (
        "relu(reduce[k](matmul(partition[1,k](x), partition[0,k](w))))",
        "reduce[k](relu(matmul(partition[1,k](x), partition[0,k](w))))",
        MATRICES,
    ),
    (
        "linear(x, w, b)",
        "add_bias(reduce[k](linear(partition[1,k](x), partition[0,k](w), replicate[k](b))), b)",
        MATRICES,
    ),
    ("partition[0,k](combine[1,k](x))", "partition[1,k](combine[0,k](x))", {"x": "a,a@k"}),
    ("softmax(x)", "combine[1,k](softmax(partition[1,k](x)))", MATRICES),
    (
        "partition[0,k](concat[0](x, y))",
        "concat[0](partition[0,k](x), partition[0,k](y))",
        {"x": "a,c", "y": "b,c"},
    ),
    (
        "combine[0,k](concat[0](x, y))",
        "concat[0](combine[0,k](x), combine[0,k](y))",
        {"x": "a,c@k", "y": "b,c@k"},
    ),
    (
        "batch_norm(x, n, s, g, b)",
        "combine[0,k](batch_norm(partition[0,k](x), replicate[k](b), replicate[k](s), replicate[k](g), "
        "replicate[k](n)))",
        {**IMAGES, "x": "a,a,h,v"},
    ),
    ("conv(x, w)", "reduce[k](conv(replicate[k](x), replicate[k](w)))", KERNELS),
    ("conv_relu(x, w)", "conv(relu(x), w)", KERNELS),
    (
        "linear(x, concat[1](w, v), concat[0](b, b))",
        "concat[1](matmul(x, w), linear(x, v, b))",
        {"x": "a,a", "w": "a,a", "v": "a,a", "b": "a"},
    ),
    ("multiply_along[1](conv(x, w), b)", "conv(x, multiply_along[1](w, b))", IMAGES),
    ("multiply_along[1](add_along[1](x, b), g)", "add_along[1](multiply_along[1](x, g), b)", IMAGES),
    (
        "batch_norm(conv(x, w), n, s, g, b)",
        "add_along[1](conv(x, multiply_along[0](w, s)), add(multiply(n, s), b))",
        IMAGES,
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{left} = {right}" for left, right, _ in WRONG])
def test_a_wrong_rule_is_refused_by_the_fingerprint_the_proof_and_the_execution(
    wrong: tuple[str, str, dict[str, str]],
) -> None:
    candidate = read_candidate(*wrong)
    assert not candidate.holds()
    assert prove(candidate.source[0], candidate.target[0], candidate.types) is None
    same_types = type_of(candidate.source[0], candidate.types) == type_of(
        candidate.target[0], candidate.types
    )
    assert not same_types or not agree(
        candidate.source, candidate.target, candidate.types, {"k": 2}, 3, whole=True
    )
