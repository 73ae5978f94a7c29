"""The torch operators faN::forward and faN::backward: what torch.compile and autograd see of a generation.

An operator takes tensors and plain values only. So what a call says has two forms: `Arguments`, by the names of the
public signature, and inside an operator the types of `SCHEMA`, where a window is two numbers and a Config a string.
"""

import functools
import json
import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_common.capabilities import NO_BACKWARD
from fa_common.problem import UnsupportedProblem, Window, lse_shape

SCHEMA = (
    "float? softmax_scale, bool causal, SymInt? window_left, SymInt? window_right, float softcap, bool deterministic, "
    "str config, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)
NUM_DENSE_ARGUMENTS = 6


class Arguments(NamedTuple):
    """All that a call says beside q, k and v.

    Until something asks for a name they travel as a plain tuple in this order, which is quicker to make: a dense call's
    has the first NUM_DENSE_ARGUMENTS, a varlen call's has them all.
    """

    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    deterministic: bool
    config: Any
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


def to_operator(arguments: tuple) -> tuple:
    """Arguments in the order and the types of SCHEMA."""
    softmax_scale, causal, (left, right), softcap, deterministic, config, *sequences = Arguments(*arguments)
    return (softmax_scale, causal, left, right, softcap, deterministic, encode(config), *sequences)


def from_operator(values: tuple, config_type: type) -> dict[str, Any]:
    """What `to_operator` was given, by name."""
    softmax_scale, causal, left, right, softcap, deterministic, string, *sequences = values
    config = decode(string, config_type)
    return Arguments(softmax_scale, causal, (left, right), softcap, deterministic, config, *sequences)._asdict()


def encode(config: Any) -> str:
    """A Config as JSON, "" for None."""
    return "" if config is None else _json(tuple((f.name, _constant(getattr(config, f.name))) for f in fields(config)))


@functools.lru_cache
def decode(string: str, config_type: type) -> Any:
    """The Config that `encode` was given."""
    return config_type(**json.loads(string)) if string else None


# torch.compile takes the string for a constant of the graph. It is made from the fields' values, not from the Config:
# those the compiler guards, so that a Config with other values never runs the graph of this one.
@torch.compiler.assume_constant_result
def _json(items: tuple[tuple[str, Any], ...]) -> str:
    return json.dumps(dict(items))


def _constant(value: Any) -> Any:
    # An int that differed in an earlier compilation is symbolic in this one, until it is asked to be an index.
    return operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value


def define_operators(
    namespace: str, config_type: type, forward: Callable, backward: Callable, *, cuda_backward: bool
) -> Callable:
    """Registers NAMESPACE::forward, which is differentiable, and NAMESPACE::backward; returns the former.

    `forward` and `backward` are a Generation's methods; `cuda_backward` says whether the latter takes CUDA tensors.
    """
    operators = getattr(torch.ops, namespace)

    def run_forward(q, k, v, *values):
        arguments = from_operator(values, config_type)
        del arguments["deterministic"]  # a promise about gradients; the forward always keeps it
        return forward(q, k, v, **arguments)

    def run_backward(dout, dlse, q, k, v, out, lse, *values):
        return backward(dout, q, k, v, out, lse, dlse=dlse, **from_operator(values, config_type))

    def allocate_forward(q, k, v, *values):
        return q.new_empty(q.shape), q.new_empty(lse_shape(q), dtype=torch.float32)

    def allocate_backward(dout, dlse, q, k, v, out, lse, *values):
        if q.is_cuda and not cuda_backward:  # the compiler asks here, before anything runs
            raise UnsupportedProblem(f"{namespace} cannot run this problem: {NO_BACKWARD}")
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx, inputs, output):
        q, k, v, *values, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
        ctx.values, ctx.max_seqlens = values, (max_seqlen_q, max_seqlen_k)
        ctx.set_materialize_grads(False)  # no gradient of LSE is None, not zeros to compute with

    def differentiate(ctx, dout, dlse):
        q, k, v, out, lse, *cu_seqlens = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        values = (*ctx.values, *cu_seqlens, *ctx.max_seqlens)
        gradients = operators.backward.default(dout, dlse, q, k, v, out, lse, *values)
        return (*gradients, *(None for _ in values))

    def define(name: str, run: Callable, allocate: Callable, schema: str) -> torch.library.CustomOpDef:
        definition = torch.library.custom_op(f"{namespace}::{name}", run, mutates_args=(), schema=schema)
        definition.register_fake(allocate)
        return definition

    qkv = "Tensor q, Tensor k, Tensor v"
    saved = f"Tensor dout, Tensor? dlse, {qkv}, Tensor out, Tensor lse"
    define("backward", run_backward, allocate_backward, f"({saved}, {SCHEMA}) -> (Tensor, Tensor, Tensor)")
    definition = define("forward", run_forward, allocate_forward, f"({qkv}, {SCHEMA}) -> (Tensor, Tensor)")
    definition.register_autograd(differentiate, setup_context=save)
    return operators.forward.default
