"""The pointwise operators of ATen, by name; an overload "default" is left out.

The tagged ones are what PyTorch's own tag `pointwise` marks (torch 2.13; a test compares), written down so that no
torch is needed to read a graph. The untagged ones are pointwise too, but lack the tag.
"""

from __future__ import annotations

_TAGGED = """
__lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor __xor__.Scalar __xor__.Tensor
_conj_physical abs acos acosh add.Scalar add.Tensor addcdiv addcmul angle asin asinh atan atan2 atanh
bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_left_shift.Scalar_Tensor
bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not bitwise_or.Scalar
bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor
bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Tensor ceil celu
clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor clip clip.Tensor clone
conj_physical copysign.Scalar copysign.Tensor cos cosh deg2rad digamma div.Scalar div.Scalar_mode div.Tensor
div.Tensor_mode elu eq.Scalar eq.Tensor erf erfc erfinv exp exp2 expm1 float_power.Scalar
float_power.Tensor_Scalar float_power.Tensor_Tensor floor fmax fmin fmod.Scalar fmod.Tensor frac
frexp.Tensor gcd ge.Scalar ge.Tensor gelu gelu_backward gt.Scalar gt.Tensor hardshrink hardsigmoid hardtanh
heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp.Tensor le.Scalar
le.Tensor leaky_relu lerp.Scalar lerp.Tensor lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logit logit_backward lt.Scalar lt.Tensor masked_fill.Scalar max.other
maximum min.other minimum mish mul.Scalar mul.Tensor mvlgamma nan_to_num native_dropout_backward ne.Scalar
ne.Tensor neg nextafter polygamma positive pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor rad2deg reciprocal
relu relu6 remainder.Scalar remainder.Scalar_Tensor remainder.Tensor round round.decimals rsqrt rsub.Scalar
selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh softplus softshrink
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_chebyshev_polynomial_t special_chebyshev_polynomial_t.n_scalar
special_chebyshev_polynomial_t.x_scalar special_chebyshev_polynomial_u
special_chebyshev_polynomial_u.n_scalar special_chebyshev_polynomial_u.x_scalar
special_chebyshev_polynomial_v special_chebyshev_polynomial_v.n_scalar
special_chebyshev_polynomial_v.x_scalar special_chebyshev_polynomial_w
special_chebyshev_polynomial_w.n_scalar special_chebyshev_polynomial_w.x_scalar special_entr special_erfcx
special_hermite_polynomial_h special_hermite_polynomial_h.n_scalar special_hermite_polynomial_h.x_scalar
special_hermite_polynomial_he special_hermite_polynomial_he.n_scalar special_hermite_polynomial_he.x_scalar
special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_laguerre_polynomial_l.n_scalar
special_laguerre_polynomial_l.x_scalar special_legendre_polynomial_p special_legendre_polynomial_p.n_scalar
special_legendre_polynomial_p.x_scalar special_log_ndtr special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_t.n_scalar special_shifted_chebyshev_polynomial_t.x_scalar
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_u.n_scalar
special_shifted_chebyshev_polynomial_u.x_scalar special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_v.n_scalar special_shifted_chebyshev_polynomial_v.x_scalar
special_shifted_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_w.n_scalar
special_shifted_chebyshev_polynomial_w.x_scalar special_spherical_bessel_j0 special_xlog1py
special_xlog1py.other_scalar special_xlog1py.self_scalar special_zeta special_zeta.other_scalar
special_zeta.self_scalar sqrt square sub.Scalar sub.Tensor tan tanh tanh_backward threshold
threshold_backward true_divide.Tensor trunc where.self xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
"""
_UNTAGGED = """
_to_copy to.dtype to.dtype_layout to.device to.other type_as detach alias hardswish log_sigmoid floor_divide
floor_divide.Scalar masked_fill.Tensor where.Scalar where.ScalarOther where.ScalarSelf rsub.Tensor
lift_fresh_copy contiguous copy fill.Scalar fill.Tensor __and__.Scalar __and__.Tensor __or__.Scalar
__or__.Tensor
"""

TAGGED = frozenset(_TAGGED.split())
POINTWISE = frozenset(
    f"aten.{name}" if "." in name else f"aten.{name}.default" for name in TAGGED.union(_UNTAGGED.split())
)

# Operations an element where more than one: transcendental functions, counted as the roofline needs them, roughly.
COSTLY: dict[str, float] = {
    "exp": 8.0,
    "log": 8.0,
    "tanh": 10.0,
    "sigmoid": 10.0,
    "gelu": 14.0,
    "silu": 11.0,
    "erf": 12.0,
    "sin": 10.0,
    "cos": 10.0,
    "pow": 12.0,
    "softplus": 12.0,
    "mish": 20.0,
    "sqrt": 4.0,
    "rsqrt": 4.0,
    "div": 4.0,
}
