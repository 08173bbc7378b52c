"""Which rule an operator has, by target."""

from __future__ import annotations

import re
from functools import lru_cache

from graph.rules.activations import GatedRule, SlopeRule
from graph.rules.attention import OURS as ATTENTION
from graph.rules.attention import AttentionRule
from graph.rules.bags import EmbeddingBagRule, RaggedEmbeddingBagRule
from graph.rules.batch_norm import (
    BatchNormApplyRule,
    BatchNormLocalRule,
    FixedMomentsRule,
    MomentsRule,
    RunningStatisticsRule,
)
from graph.rules.common import BaseRule
from graph.rules.contractions import ContractionRule, OuterRule
from graph.rules.convolution import ConvolutionRule
from graph.rules.dropout import DropoutRule, RandomRule
from graph.rules.experts import GroupedProductRule, HistogramRule
from graph.rules.generic import (
    DimwiseRule,
    FactoryRule,
    PointwiseRule,
    SampleRule,
    WholeRule,
    dims_argument,
    dims_from,
    last_dims,
)
from graph.rules.indexing import IndexAddRule, IndexPutRule, IndexRule, SortRule
from graph.rules.likelihoods import LikelihoodRule
from graph.rules.normalization import GroupNormRule, InstanceNormRule, LayerNormRule
from graph.rules.padding import PadRule, RangeRule
from graph.rules.pointwise_targets import COSTLY, POINTWISE
from graph.rules.pooling import AdaptiveAveragePoolingRule, PoolingRule
from graph.rules.products import AddedProductRule, LinearRule, MatrixProductRule
from graph.rules.recurrent import RecurrentCellRule, RecurrentLayerRule
from graph.rules.reductions import CrossEntropyRule, ElementwiseLossRule, SumRule
from graph.rules.repeats import RepeatRule
from graph.rules.scattering import GatherRule, ScatterRule
from graph.rules.slices import (
    CatRule,
    EmbeddingRule,
    IndexSelectRule,
    SelectRule,
    SliceRule,
    SplitRule,
    StackRule,
    UnbindRule,
)
from graph.rules.transposed import TransposedConvolutionRule
from graph.rules.views import ExpandRule, PermuteRule, ReshapeRule

UNKNOWN = WholeRule("runs whole: {target} has no rule")


class CostlyPointwiseRule(PointwiseRule):
    """A pointwise operator that takes several operations an element."""

    def __init__(self, flops_per_output: float) -> None:
        self.flops_per_output = flops_per_output


def _table() -> dict[str, BaseRule]:
    pointwise = PointwiseRule()
    factory = FactoryRule()
    loss = ElementwiseLossRule()
    product = MatrixProductRule()
    added = AddedProductRule()
    cross_entropy = CrossEntropyRule()
    attention = AttentionRule()
    softmax = DimwiseRule(dims_argument(), flops_per_input=10.0)
    cumulative = DimwiseRule(dims_argument())
    reduced = DimwiseRule(dims_argument(), reduces=True)
    triangle = DimwiseRule(last_dims(2))
    table: dict[str, BaseRule] = dict.fromkeys(sorted(POINTWISE), pointwise)
    for target in table:
        name = target.split(".")[1]
        if name in COSTLY:
            table[target] = CostlyPointwiseRule(COSTLY[name])
    table |= {
        "aten.cat.default": CatRule(),
        "aten.stack.default": StackRule(),
        "aten.view.default": ReshapeRule(),
        "aten.permute.default": PermuteRule(),
        "aten.expand.default": ExpandRule(),
        "aten.select.int": SelectRule(),
        "aten.slice.Tensor": SliceRule(),
        "aten.split_with_sizes.default": SplitRule(),
        "aten.unbind.int": UnbindRule(),
        "aten.index_select.default": IndexSelectRule(),
        "aten.index.Tensor": IndexRule(),
        "aten.index_put.default": IndexPutRule(),
        "aten.index_add.default": IndexAddRule(),
        "aten.histc.default": HistogramRule(),
        "soapstone.grouped_mm": GroupedProductRule(),
        "aten.embedding.default": EmbeddingRule(),
        "aten.linear.default": LinearRule(),
        "aten.mm.default": product,
        "aten.bmm.default": product,
        "aten.matmul.default": product,
        "aten.mv.default": product,
        "aten.dot.default": product,
        "aten.outer.default": OuterRule(),
        "aten.einsum.default": ContractionRule(),
        "aten.tensordot.default": ContractionRule(),
        "aten.addmm.default": added,
        "aten.baddbmm.default": added,
        **dict.fromkeys(
            ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"),
            RecurrentLayerRule(),
        ),
        "aten.lstm_cell.default": RecurrentCellRule(4),
        "aten.gru_cell.default": RecurrentCellRule(3),
        "aten.rnn_tanh_cell.default": RecurrentCellRule(1),
        "aten.rnn_relu_cell.default": RecurrentCellRule(1),
        "aten.layer_norm.default": LayerNormRule(),
        "aten.rms_norm.default": LayerNormRule(),
        "aten.group_norm.default": GroupNormRule(),
        "aten.instance_norm.default": InstanceNormRule(),
        "aten.prelu.default": SlopeRule(),
        "aten.glu.default": GatedRule(),
        "aten.scaled_dot_product_attention.default": attention,
        ATTENTION: attention,
        "aten.sum.default": SumRule(mean=False),
        "aten.sum.dim_IntList": SumRule(mean=False),
        "aten.mean.default": SumRule(mean=True),
        "aten.mean.dim": SumRule(mean=True),
        "aten.cross_entropy_loss.default": cross_entropy,
        "soapstone.cross_entropy_sums": cross_entropy,
        "soapstone.ratio": WholeRule(),
        "soapstone.moments": MomentsRule(),
        "soapstone.fixed_moments": FixedMomentsRule(),
        "soapstone.batch_norm_apply": BatchNormApplyRule(),
        "soapstone.batch_norm": BatchNormLocalRule(),
        "soapstone.running_statistics": RunningStatisticsRule(),
        "soapstone.dropout": DropoutRule(),
        "soapstone.random": RandomRule(),
        "soapstone.constant": WholeRule(),
        "aten.full.default": factory,
        "aten.zeros.default": factory,
        "aten.ones.default": factory,
        "aten.arange.start_step": RangeRule(),
        "aten.softmax.int": softmax,
        "aten._softmax.default": softmax,
        "aten.log_softmax.int": softmax,
        "aten._log_softmax.default": softmax,
        "aten.cumsum.default": cumulative,
        "aten.cumprod.default": cumulative,
        "aten.sort.stable": SortRule(),
        "aten.topk.default": cumulative,
        "aten.flip.default": DimwiseRule(dims_argument("dims"), flops_per_input=0.0),
        "aten.tril.default": triangle,
        "aten.triu.default": triangle,
    }
    for name in ("max_pool", "avg_pool"):
        for spatial in (1, 2, 3):
            table[f"aten.{name}{spatial}d.default"] = PoolingRule(name, spatial)
            table[f"soapstone.{name}{spatial}d"] = PoolingRule(name, spatial)
    for spatial in (1, 2, 3):
        for overload in ("default", "padding"):
            table[f"aten.conv{spatial}d.{overload}"] = ConvolutionRule(spatial)
        table[f"soapstone.conv{spatial}d"] = ConvolutionRule(spatial)
        table[f"aten.adaptive_avg_pool{spatial}d.default"] = AdaptiveAveragePoolingRule(spatial)
    for name in LOSSES:
        table[f"aten.{name}.default"] = loss
        table[f"soapstone.{name}"] = loss
    for target in ("amax.default", "amin.default", "logsumexp.default", "argmax.default", "argmin.default"):
        table[f"aten.{target}"] = reduced
    for target in ("var.correction", "var.dim", "std.correction", "std.dim"):
        table[f"aten.{target}"] = DimwiseRule(dims_argument(), reduces=True, flops_per_input=4.0)
    for target in ("max.dim", "min.dim", "prod.dim_int", "linalg_vector_norm.default"):
        table[f"aten.{target}"] = reduced
    for mode in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d"):
        table[f"aten.upsample_{mode}.vec"] = DimwiseRule(dims_from(2), flops_per_input=4.0)
    for spatial in (1, 2, 3):
        table[f"aten.adaptive_max_pool{spatial}d.default"] = DimwiseRule(dims_from(2))
        overload = "default" if spatial == 1 else "input"
        table[f"aten.conv_transpose{spatial}d.{overload}"] = TransposedConvolutionRule(spatial)
        table[f"soapstone.conv_transpose{spatial}d"] = TransposedConvolutionRule(spatial)
    table["aten.roll.default"] = DimwiseRule(dims_argument("dims"), flops_per_input=0.0)
    table["aten.pad.default"] = PadRule()
    table["aten.constant_pad_nd.default"] = table["aten.pad.default"]
    table["aten.pixel_shuffle.default"] = SampleRule()
    table["aten.pixel_unshuffle.default"] = SampleRule()
    _add_places(table)
    # Operators that rules rewrite a part to have the costs of the original.
    table["soapstone.embedding"] = table["aten.embedding.default"]
    for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
        table[f"soapstone.{name}"] = table[f"aten.{name}.default"]
    table["soapstone.mean"] = table["aten.mean.dim"]
    table["soapstone.arange"] = table["aten.arange.start_step"]
    for name in ("index_put", "index_add"):
        table[f"soapstone.{name}"] = table[f"aten.{name}.default"]
    return table


def _add_places(table: dict[str, BaseRule]) -> None:
    """Add the operators that read, write or repeat along dims at places that indexes name."""
    gather, likelihood = GatherRule(), LikelihoodRule()
    scatter, scatter_add = ScatterRule(adds=False), ScatterRule(adds=True)
    table |= {
        "aten.repeat.default": RepeatRule("repeats"),
        "aten.tile.default": RepeatRule("dims"),
        "aten.gather.default": gather,
        "soapstone.gather": gather,
        "aten.scatter.src": scatter,
        "aten.scatter.value": scatter,
        "aten.scatter_reduce.two": scatter,
        "aten.scatter_add.default": scatter_add,
        "soapstone.scatter": scatter_add,
        "soapstone.ragged_embedding_bag": RaggedEmbeddingBagRule(),
        "soapstone.embedding_bag": EmbeddingBagRule(),
        "soapstone.nll_loss": likelihood,
        "soapstone.nll_sums": likelihood,
    }
    for target in ("nll_loss_nd", "nll_loss", "nll_loss2d"):
        table[f"aten.{target}.default"] = likelihood


LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "kl_div",
)


@lru_cache(maxsize=1)
def rules() -> dict[str, BaseRule]:
    """Return all rules by target."""
    return _table()


def rule_for(target: str) -> BaseRule:
    """Return the rule of an operator type; an unknown one runs whole."""
    return rules().get(target, UNKNOWN)


def is_known(target: str) -> bool:
    """True where an operator type has a rule of its own."""
    return target in rules()


def rule_name(target: str) -> str:
    """Return the name of an operator type's rule for a report; "none" where it has no rule."""
    if not is_known(target):
        return "none"
    words = re.findall("[A-Z][a-z]*", type(rule_for(target)).__name__.removesuffix("Rule"))
    return " ".join(words).lower()
