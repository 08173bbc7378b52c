"""First-order properties of operators: all that proofs may use. Each is tested numerically on every type it fits.

A property is an equation between terms. Its variables stand for any terms, its dims d, degrees k and m and factors s
for any such attribute; of both sides an instance must be well-typed, with one type.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph.substitutions.terms import Term, parse


@dataclass(frozen=True, slots=True)
class Property:
    """An equation by which either side may stand for the other."""

    name: str
    left: Term
    right: Term


_EQUATIONS: dict[str, str] = {
    "add is commutative": "add(x, y) = add(y, x)",
    "add is associative": "add(add(x, y), z) = add(x, add(y, z))",
    "multiply is commutative": "multiply(x, y) = multiply(y, x)",
    "multiply is associative": "multiply(multiply(x, y), z) = multiply(x, multiply(y, z))",
    "multiply distributes over add": "multiply(add(x, y), z) = add(multiply(x, z), multiply(y, z))",
    "scale distributes over add": "scale[s](add(x, y)) = add(scale[s](x), scale[s](y))",
    "scale of multiply": "scale[s](multiply(x, y)) = multiply(scale[s](x), y)",
    "transpose is its inverse": "transpose(transpose(x)) = x",
    "matmul is associative": "matmul(matmul(x, w), v) = matmul(x, matmul(w, v))",
    "transpose of matmul": "transpose(matmul(x, w)) = matmul(transpose(w), transpose(x))",
    "matmul_relu is relu of matmul": "matmul_relu(x, w) = relu(matmul(x, w))",
    "linear is add_bias of matmul": "linear(x, w, b) = add_bias(matmul(x, w), b)",
    "linear_relu is relu of linear": "linear_relu(x, w, b) = relu(linear(x, w, b))",
    "conv_relu is relu of conv": "conv_relu(x, w) = relu(conv(x, w))",
    "add_bias of add": "add_bias(add(x, y), b) = add(add_bias(x, b), y)",
    "add_bias of two biases": "add_bias(add_bias(x, b), d) = add_bias(x, add(b, d))",
    "flatten of unflatten": "flatten(unflatten(x)) = x",
    "unflatten of flatten": "unflatten(flatten(x)) = x",
    "flatten of matmul": "flatten(matmul(x, w)) = matmul(flatten(x), w)",
    "matmul of unflatten": "matmul(unflatten(x), w) = unflatten(matmul(x, w))",
    "flatten of concat": "flatten(concat[0](x, y)) = concat[0](flatten(x), flatten(y))",
    "unflatten of concat": "unflatten(concat[0](x, y)) = concat[0](unflatten(x), unflatten(y))",
    "flatten of concat of last dims": "flatten(concat[2](x, y)) = concat[1](flatten(x), flatten(y))",
    "add_along of add_along": "add_along[d](add_along[d](x, b), e) = add_along[d](x, add(b, e))",
    "multiply_along of add_along": (
        "multiply_along[d](add_along[d](x, b), g) = add_along[d](multiply_along[d](x, g), multiply(b, g))"
    ),
    "multiply_along of conv": "multiply_along[1](conv(x, w), g) = conv(x, multiply_along[0](w, g))",
    "batch_norm of inference is a factor and a sum by channel": (
        "batch_norm(x, n, s, g, b) = add_along[1](multiply_along[1](add_along[1](x, n), multiply(s, g)), b)"
    ),
    "concat is associative": "concat[d](concat[d](x, y), z) = concat[d](x, concat[d](y, z))",
    "concat of concats": (
        "concat[0](concat[1](x, y), concat[1](z, u)) = concat[1](concat[0](x, z), concat[0](y, u))"
    ),
    "first half of concat": "split[d,0,l](concat[d](x, y)) = x",
    "second half of concat": "split[d,1,l](concat[d](x, y)) = y",
    "concat of both halves": "concat[d](split[d,0,l](x), split[d,1,l](x)) = x",
    "transpose of concat 0": "transpose(concat[0](x, y)) = concat[1](transpose(x), transpose(y))",
    "transpose of concat 1": "transpose(concat[1](x, y)) = concat[0](transpose(x), transpose(y))",
    "matmul of joined rows": "matmul(concat[0](x, y), w) = concat[0](matmul(x, w), matmul(y, w))",
    "matmul of joined columns": "matmul(x, concat[1](w, v)) = concat[1](matmul(x, w), matmul(x, v))",
    "matmul of joined inner dims": (
        "matmul(concat[1](x, y), concat[0](w, v)) = add(matmul(x, w), matmul(y, v))"
    ),
    "linear of joined columns": (
        "linear(x, concat[1](w, v), concat[0](b, d)) = concat[1](linear(x, w, b), linear(x, v, d))"
    ),
    "add_bias of joined rows": "add_bias(concat[0](x, y), b) = concat[0](add_bias(x, b), add_bias(y, b))",
    "add_bias of joined columns": (
        "add_bias(concat[1](x, y), concat[0](b, d)) = concat[1](add_bias(x, b), add_bias(y, d))"
    ),
    "add_along of joined channels": (
        "add_along[1](concat[1](x, y), concat[0](b, e)) = concat[1](add_along[1](x, b), add_along[1](y, e))"
    ),
    "conv of joined images": "conv(concat[0](x, y), w) = concat[0](conv(x, w), conv(y, w))",
    "conv of joined kernels": "conv(x, concat[0](w, v)) = concat[1](conv(x, w), conv(x, v))",
    "conv of joined channels": "conv(concat[1](x, y), concat[1](w, v)) = add(conv(x, w), conv(y, v))",
    "combine of partition": "combine[d,k](partition[d,k](x)) = x",
    "partition of combine": "partition[d,k](combine[d,k](x)) = x",
    "reduce of add": "reduce[k](add(x, y)) = add(reduce[k](x), reduce[k](y))",
    "reduce of scale": "reduce[k](scale[s](x)) = scale[s](reduce[k](x))",
    "reduce of transpose": "reduce[k](transpose(x)) = transpose(reduce[k](x))",
    "reduce of flatten": "reduce[k](flatten(x)) = flatten(reduce[k](x))",
    "reduce of unflatten": "reduce[k](unflatten(x)) = unflatten(reduce[k](x))",
    "reduce of multiply": "reduce[k](multiply(x, replicate[k](y))) = multiply(reduce[k](x), y)",
    "matmul of reduce": "matmul(reduce[k](x), w) = reduce[k](matmul(x, replicate[k](w)))",
    "matmul by reduce": "matmul(x, reduce[k](w)) = reduce[k](matmul(replicate[k](x), w))",
    "conv of reduce": "conv(reduce[k](x), w) = reduce[k](conv(x, replicate[k](w)))",
    "conv by reduce": "conv(x, reduce[k](w)) = reduce[k](conv(replicate[k](x), w))",
    "transpose of partition 0": "transpose(partition[0,k](x)) = partition[1,k](transpose(x))",
    "transpose of partition 1": "transpose(partition[1,k](x)) = partition[0,k](transpose(x))",
    "transpose of combine 0": "transpose(combine[0,k](x)) = combine[1,k](transpose(x))",
    "transpose of combine 1": "transpose(combine[1,k](x)) = combine[0,k](transpose(x))",
    "transpose of replicate": "transpose(replicate[k](x)) = replicate[k](transpose(x))",
    "flatten of replicate": "flatten(replicate[k](x)) = replicate[k](flatten(x))",
    "unflatten of replicate": "unflatten(replicate[k](x)) = replicate[k](unflatten(x))",
    "flatten of partition": "flatten(partition[0,k](x)) = partition[0,k](flatten(x))",
    "flatten of combine": "flatten(combine[0,k](x)) = combine[0,k](flatten(x))",
    "unflatten of partition": "unflatten(partition[0,k](x)) = partition[0,k](unflatten(x))",
    "unflatten of combine": "unflatten(combine[0,k](x)) = combine[0,k](unflatten(x))",
    "flatten of partition of last dims": "flatten(partition[2,k](x)) = partition[1,k](flatten(x))",
    "flatten of combine of last dims": "flatten(combine[2,k](x)) = combine[1,k](flatten(x))",
    "matmul in parallel samples": "combine[0,k](matmul(x, replicate[k](w))) = matmul(combine[0,k](x), w)",
    "matmul in parallel columns": "combine[1,k](matmul(replicate[k](x), w)) = matmul(x, combine[1,k](w))",
    "matmul in parallel inner dims": "reduce[k](matmul(x, w)) = matmul(combine[1,k](x), combine[0,k](w))",
    "parts of matmul in samples": "partition[0,k](matmul(x, w)) = matmul(partition[0,k](x), replicate[k](w))",
    "parts of matmul in columns": "partition[1,k](matmul(x, w)) = matmul(replicate[k](x), partition[1,k](w))",
    "matmul in parts of inner dims": "reduce[k](matmul(partition[1,k](x), partition[0,k](w))) = matmul(x, w)",
    "copies of matmul": "replicate[k](matmul(x, w)) = matmul(replicate[k](x), replicate[k](w))",
    "add_bias in parallel samples": (
        "combine[0,k](add_bias(x, replicate[k](b))) = add_bias(combine[0,k](x), b)"
    ),
    "add_bias in parallel columns": (
        "combine[1,k](add_bias(x, b)) = add_bias(combine[1,k](x), combine[0,k](b))"
    ),
    "parts of add_bias in samples": (
        "partition[0,k](add_bias(x, b)) = add_bias(partition[0,k](x), replicate[k](b))"
    ),
    "parts of add_bias in columns": (
        "partition[1,k](add_bias(x, b)) = add_bias(partition[1,k](x), partition[0,k](b))"
    ),
    "copies of add_bias": "replicate[k](add_bias(x, b)) = add_bias(replicate[k](x), replicate[k](b))",
    "add_bias of reduce": "reduce[k](add_bias(x, b)) = add_bias(reduce[k](x), reduce[k](b))",
    "conv in parallel images": "combine[0,k](conv(x, replicate[k](w))) = conv(combine[0,k](x), w)",
    "conv in parallel kernels": "combine[1,k](conv(replicate[k](x), w)) = conv(x, combine[0,k](w))",
    "conv in parallel channels": "reduce[k](conv(x, w)) = conv(combine[1,k](x), combine[1,k](w))",
    "parts of conv in images": "partition[0,k](conv(x, w)) = conv(partition[0,k](x), replicate[k](w))",
    "parts of conv in kernels": "partition[1,k](conv(x, w)) = conv(replicate[k](x), partition[0,k](w))",
    "conv in parts of channels": "reduce[k](conv(partition[1,k](x), partition[1,k](w))) = conv(x, w)",
    "copies of conv": "replicate[k](conv(x, w)) = conv(replicate[k](x), replicate[k](w))",
    "softmax in parallel rows": "combine[0,k](softmax(x)) = softmax(combine[0,k](x))",
    "parts of softmax in rows": "partition[0,k](softmax(x)) = softmax(partition[0,k](x))",
    "copies of softmax": "replicate[k](softmax(x)) = softmax(replicate[k](x))",
    "batch_norm in parallel images": (
        "combine[0,k](batch_norm(x, replicate[k](n), replicate[k](s), replicate[k](g), replicate[k](b))) = "
        "batch_norm(combine[0,k](x), n, s, g, b)"
    ),
    "batch_norm in parallel channels": (
        "combine[1,k](batch_norm(x, n, s, g, b)) = "
        "batch_norm(combine[1,k](x), combine[0,k](n), combine[0,k](s), combine[0,k](g), combine[0,k](b))"
    ),
    "copies of concat": "replicate[k](concat[d](x, y)) = concat[d](replicate[k](x), replicate[k](y))",
    "copies of a half": "replicate[k](split[d,i,l](x)) = split[d,i,l](replicate[k](x))",
    "reduce of concat": "reduce[k](concat[d](x, y)) = concat[d](reduce[k](x), reduce[k](y))",
    "partition of concat of other dims": (
        "partition[d,k](concat[e](x, y)) = concat[e](partition[d,k](x), partition[d,k](y))"
    ),
    "combine of concat of other dims": (
        "combine[d,k](concat[e](x, y)) = concat[e](combine[d,k](x), combine[d,k](y))"
    ),
    "partition of a half of other dims": "partition[d,k](split[e,i,l](x)) = split[e,i,l](partition[d,k](x))",
    "combine of a half of other dims": "combine[d,k](split[e,i,l](x)) = split[e,i,l](combine[d,k](x))",
    "copies of parts": "replicate[m](partition[d,k](x)) = partition[d,k](replicate[m](x))",
    "copies of combine": "replicate[m](combine[d,k](x)) = combine[d,k](replicate[m](x))",
    "copies of reduce": "replicate[m](reduce[k](x)) = reduce[k](replicate[m](x))",
    "copies of copies": "replicate[m](replicate[k](x)) = replicate[k](replicate[m](x))",
    "reduce of reduce": "reduce[m](reduce[k](x)) = reduce[k](reduce[m](x))",
    "reduce of parts": "reduce[m](partition[d,k](x)) = partition[d,k](reduce[m](x))",
    "reduce of combine": "reduce[m](combine[d,k](x)) = combine[d,k](reduce[m](x))",
    "partition of other dims": "partition[d,k](partition[e,m](x)) = partition[e,m](partition[d,k](x))",
    "combine of other dims": "combine[d,k](combine[e,m](x)) = combine[e,m](combine[d,k](x))",
    "partition and combine of other dims": (
        "partition[d,k](combine[e,m](x)) = combine[e,m](partition[d,k](x))"
    ),
}

_MOVES = (
    "concat[d]",
    "split[d,i,l]",
    "partition[d,k]",
    "combine[d,k]",
    "replicate[k]",
    "transpose",
    "flatten",
    "unflatten",
)


def _elementwise() -> dict[str, str]:
    """Return the properties of operators of single elements: each may be done before or after a tensor is moved."""
    found = {}
    for move in _MOVES:
        name = move.split("[")[0]
        for kind in ("relu", "scale[s]"):
            title = f"{kind.split('[')[0]} of {name}"
            if name == "concat":
                found[title] = f"{kind}({move}(x, y)) = {move}({kind}(x), {kind}(y))"
            else:
                found[title] = f"{kind}({move}(x)) = {move}({kind}(x))"
        for kind in ("add", "multiply"):
            title = f"{kind} of {name}"
            if name == "concat":
                found[title] = f"{kind}({move}(x, y), {move}(z, u)) = {move}({kind}(x, z), {kind}(y, u))"
            else:
                found[title] = f"{kind}({move}(x), {move}(y)) = {move}({kind}(x, y))"
    for kind in ("matmul", "conv"):
        found[f"{kind} distributes over add"] = f"{kind}(add(x, y), w) = add({kind}(x, w), {kind}(y, w))"
        found[f"{kind} by a sum"] = f"{kind}(x, add(w, v)) = add({kind}(x, w), {kind}(x, v))"
        found[f"{kind} of scale"] = f"{kind}(scale[s](x), w) = scale[s]({kind}(x, w))"
        found[f"{kind} by scale"] = f"{kind}(x, scale[s](w)) = scale[s]({kind}(x, w))"
    return found


def _property(name: str, text: str) -> Property:
    left, right = text.split(" = ")
    return Property(name, parse(left), parse(right))


PROPERTIES = tuple(_property(name, text) for name, text in {**_EQUATIONS, **_elementwise()}.items())
