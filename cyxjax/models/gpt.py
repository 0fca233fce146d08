"""A decoder-only transformer: maps token ids to the logits of each next token.

Source: Radford et al. 2019 (GPT-2): norm before each sublayer and after the last, GELU in its tanh form,
learned positions, output weights tied to the embedding, residual projections initialised smaller.
Difference from GPT-2: no dropout on attention weights, so that fused attention kernels can be used.

Shape suffixes: B samples, T places in the text, D width of the model, N heads, K width of a head,
V tokens in the vocabulary.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from cyxjax.core.exact.calls import must_repeat
from cyxjax.errors import DataError
from cyxjax.models.networks import Network
from cyxjax.models.registry import Count, Rate, register

_STDDEV = 0.02  # of every weight matrix at the start (GPT-1 and GPT-2)


class Attention(nn.Module):
    """Causal self-attention (B, T, D) -> (B, T, D): position t attends to positions 0..t."""

    num_heads: int
    out_stddev: float
    use_bias: bool

    @nn.compact
    def __call__(self, x_BTD: jax.Array, train: bool = False) -> jax.Array:
        B, T, D = x_BTD.shape
        make_qkv = nn.Dense(3 * D, self.use_bias, kernel_init=nn.initializers.normal(_STDDEV), name="qkv")
        qkv = _by_rows(make_qkv, x_BTD)
        shape = (B, T, self.num_heads, D // self.num_heads)
        q_BTNK, k_BTNK, v_BTNK = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        y_BTNK = (_attend_here if train else _attend)(q_BTNK, k_BTNK, v_BTNK)
        out_init = nn.initializers.normal(self.out_stddev)
        out = nn.Dense(D, self.use_bias, kernel_init=out_init, name="out")
        return _by_rows(out, y_BTNK.reshape(B, T, D))


class Block(nn.Module):
    """Attention, then a feed-forward layer four times as wide, each with a residual connection."""

    num_heads: int
    out_stddev: float
    dropout: float
    use_bias: bool

    @nn.compact
    def __call__(self, x_BTD: jax.Array, train: bool) -> jax.Array:
        D = x_BTD.shape[-1]
        drop = nn.Dropout(self.dropout, deterministic=not train)
        attention = Attention(self.num_heads, self.out_stddev, self.use_bias, name="attention")
        x_BTD = x_BTD + drop(attention(_norm("norm_1", self.use_bias)(x_BTD), train))
        y_BTD = _norm("norm_2", self.use_bias)(x_BTD)
        in_init, out_init = nn.initializers.normal(_STDDEV), nn.initializers.normal(self.out_stddev)
        expand = nn.Dense(4 * D, self.use_bias, kernel_init=in_init, name="expand")
        contract = nn.Dense(D, self.use_bias, kernel_init=out_init, name="contract")
        return x_BTD + drop(_by_rows(contract, nn.gelu(_by_rows(expand, y_BTD))))


@register("gpt")
class GPT(Network):
    """Logits (B, T, vocab_size), float32, from token ids (B, T); the defaults are GPT-2 small.

    `remat` recomputes each block in the backward pass: it needs memory for one block instead of `num_layers`,
    and about a third more arithmetic. `tie_weights=False` gives the output its own (D, V) matrix.
    `num_heads` must divide `width`. Raises: DataError for texts longer than context_length.
    """

    vocab_size: Count = 50257
    context_length: Count = 1024
    num_layers: Count = 12
    num_heads: Count = 12
    width: Count = 768
    dropout: Rate = 0.0
    use_bias: bool = True
    tie_weights: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, train: bool = False) -> jax.Array:
        if tokens_BT.shape[1] > self.context_length:
            raise DataError(
                f"GPT got texts of {tokens_BT.shape[1]} tokens, expected at most "
                f"context_length={self.context_length}. HINT: cut the texts, or raise context_length."
            )
        init = nn.initializers.normal(_STDDEV)
        token_embedding = nn.Embed(self.vocab_size, self.width, embedding_init=init, name="tokens")
        place_embedding = nn.Embed(self.context_length, self.width, embedding_init=init, name="places")
        places_T = jnp.arange(tokens_BT.shape[1])
        x_BTD = token_embedding(tokens_BT) + place_embedding(places_T)[None]
        x_BTD = nn.Dropout(self.dropout, deterministic=not train)(x_BTD)
        block = nn.remat(Block, static_argnums=(2,)) if self.remat else Block  # 2: train (0 is self)
        # Two residual sums per block: with this scale their variance does not grow with depth.
        out_stddev = _STDDEV / (2 * self.num_layers) ** 0.5
        for layer in range(self.num_layers):
            x_BTD = block(self.num_heads, out_stddev, self.dropout, self.use_bias, name=f"block_{layer}")(
                x_BTD, train
            )
        x_BTD = _norm("norm", self.use_bias)(x_BTD)
        if self.tie_weights:
            head: Callable = lambda x_MD: _product(x_MD, token_embedding.embedding.T)  # noqa: E731
        else:
            head = nn.Dense(
                self.vocab_size, use_bias=False, kernel_init=init, dot_general=_product, name="head"
            )
        return _by_rows(head, x_BTD).astype(jnp.float32)


def _by_rows(product: Callable[[jax.Array], jax.Array], x_BTD: jax.Array) -> jax.Array:
    """`product` of all positions as rows of one matrix.

    The gradient of a weight is then a product of two matrices without a copy; for (B, T, D) XLA on CPU first
    copies one of them, transposed, which takes 8 % of the step of a GPT of 4 x 256.
    """
    B, T, D = x_BTD.shape
    return product(x_BTD.reshape(B * T, D)).reshape(B, T, -1)


_TILE = 128  # a GPU multiplies matrices fastest whose columns are a multiple of this


def _product(x_MD: jax.Array, kernel_DV: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """x @ kernel, (M, V); on a GPU, the columns of the kernel are padded to whole tiles.

    GPT-2 small in bfloat16, 8 texts: an H100 takes 68 ms per step with 50,257 tokens, 23 ms with 50,304.
    """
    V = kernel_DV.shape[1]
    spare = -V % _TILE if jax.default_backend() == "gpu" else 0
    return (x_MD @ jnp.pad(kernel_DV, ((0, 0), (0, spare))))[:, :V] if spare else x_MD @ kernel_DV


def _attend(*parts_BTNK: jax.Array) -> jax.Array:
    """Causal attention of (q, k, v): the values at positions 0..t, weighted by their keys' match to query t.

    The implementation depends on the platform that the program is compiled for, which may differ from this
    process's platform (a model that is exported on a GPU and runs on CPUs).
    """
    return jax.lax.platform_dependent(*parts_BTNK, cpu=_attend_on_cpu, default=_attend_by_jax)


def _attend_here(*parts_BTNK: jax.Array) -> jax.Array:
    """`_attend` for this process's platform.

    A gradient of `_attend` keeps what the implementation of every platform needs until it is compiled, which
    wastes memory where forward and backward are separate programs (hand-written loops).
    """
    return (_attend_on_cpu if jax.default_backend() == "cpu" else _attend_by_jax)(*parts_BTNK)


def _attend_by_jax(*parts_BTNK: jax.Array) -> jax.Array:
    """jax's attention: cuDNN's kernels for long texts in half precision, else XLA's."""
    by: Literal["cudnn", "xla"] = "cudnn" if _is_for_cudnn(parts_BTNK[0]) else "xla"
    with jax.numpy_dtype_promotion("standard"):  # it multiplies float16 by its own float32
        return jax.nn.dot_product_attention(*parts_BTNK, is_causal=True, implementation=by)


# Forward and backward on an H100, bfloat16, 12 heads of 64, cuDNN and XLA: 16 texts of 1,024 take 0.5 and
# 3.5 ms, 64 of 256 take 0.36 and 0.95; few short ones, 8 of 128 with 4 heads, take 0.14 and 0.06.
_LONG = 256


def _is_for_cudnn(q_BTNK: jax.Array) -> bool:
    """Whether cuDNN's kernels are faster here and allowed: the bits of its backward pass do not repeat."""
    T, K = q_BTNK.shape[1], q_BTNK.shape[3]
    served = q_BTNK.dtype in (jnp.float16, jnp.bfloat16) and K % 8 == 0 and K <= 128
    return served and T >= _LONG and not must_repeat() and _has_cudnns_attention()


def _has_cudnns_attention() -> bool:
    """Whether this is a GPU from Ampere on; jax refuses cuDNN's attention on older ones, which use XLA's."""
    if jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.local_devices()[0], "compute_capability", 0)) >= 8.0


def _attend_on_cpu(*parts_BTNK: jax.Array) -> jax.Array:
    """Attention with a matrix (T, K) for each sample and head, which XLA on CPU multiplies fastest; jax's own
    keeps heads between positions and features there.

    float16 is widened first: jax 0.10.2 does not lower the precision that attention asks for.
    """
    dtype = parts_BTNK[0].dtype
    wide = jnp.float32 if dtype == jnp.float16 else dtype
    q_BNTK, k_BNTK, v_BNTK = (part.astype(wide).transpose(0, 2, 1, 3) for part in parts_BTNK)
    fit_BNTT = jnp.einsum("bntk,bnsk->bnts", q_BNTK, k_BNTK, preferred_element_type=jnp.float32)
    T, K = q_BNTK.shape[2:]
    seen = jnp.tril(jnp.ones((1, 1, T, T), bool))
    weight_BNTT = jax.nn.softmax(jnp.where(seen, fit_BNTT / K**0.5, -jnp.inf))
    y_BNTK = jnp.einsum("bnts,bnsk->bntk", weight_BNTT.astype(wide), v_BNTK)
    return y_BNTK.transpose(0, 2, 1, 3).astype(dtype)


def _norm(name: str, use_bias: bool) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, use_bias=use_bias, name=name)
