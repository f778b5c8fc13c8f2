"""Defines a small LLaMA in flax.nnx with an exchangeable attention, and loads text to train it.

All parts other than blocks are cheap and take constant time, so that measurements are of blocks.
The embedding is a product with one-hot rows, whose gradient is a product too. The gradient of a
lookup would be a scatter, in which all tokens add to 256 rows; it takes longer than attention.

Training is in mixed precision, as usual on accelerators. The blocks read parameters in the dtype of
the computation, and their gradients have the same dtype. The optimizer keeps float32 masters and
moments, updates them in float32, and rounds the masters once a step to the next step's parameters.
"""

import dataclasses
import functools
import pathlib
import pydoc_data.topics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_flash
import jax_flash.flax

VOCABULARY = 256  # tokens are bytes


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Holds the sizes of a model and of its batches; names are those of the LLaMA papers."""

    blocks: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    seq: int
    batch: int
    dtype: str  # of the computation; the optimizer's masters are float32
    rope_theta: float = 10000.0
    causal: bool = True

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


_7B = ModelConfig(
    blocks=2, d_model=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, seq=2048, batch=4,
    dtype="bfloat16",
)  # fmt: skip
_8B = ModelConfig(
    blocks=2, d_model=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, seq=8192, batch=1,
    dtype="bfloat16", rope_theta=500000.0,
)  # fmt: skip

# The presets have the width of the published models, and as many of their blocks as train on a GPU
# with 80 GB: a block costs the same at any depth, so more blocks add time and memory only.
# `image` has the width, heads and parameters of DiT-XL/2 (https://arxiv.org/abs/2212.09748) and
# the tokens of a picture of 1024 x 1024. `cpu` is sized for two cores.
PRESETS = {
    "cpu": ModelConfig(
        blocks=2, d_model=256, heads=4, kv_heads=2, head_dim=64, ffn=704, seq=2048, batch=1,
        dtype="float32",
    ),
    "7b": _7B,
    "7b-4k": dataclasses.replace(_7B, seq=4096, batch=2),
    "8b": _8B,
    "8b-32k": dataclasses.replace(_8B, seq=32768),
    "70b-wide": dataclasses.replace(_8B, blocks=1, d_model=8192, heads=64, ffn=28672),
    "image": ModelConfig(
        blocks=4, d_model=1152, heads=16, kv_heads=16, head_dim=72, ffn=3072, seq=4096, batch=4,
        dtype="bfloat16", causal=False,
    ),
}  # fmt: skip


def no_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool):
    """Reads the operands and writes a result, and no more: the limit that attention can reach.

    query is [B,T,N,H], key and value are [B,T,K,H], with one head dim so that they can be added.
    Without query and key in the sum, XLA would remove their projections as well.
    """
    groups = query.shape[-2] // key.shape[-2]
    return query + jnp.repeat(key + value, groups, axis=-2)


ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "jax_flash": jax_flash.dot_product_attention,
    "jax_flash_fp8": functools.partial(jax_flash.dot_product_attention, fp8=jax_flash.Fp8()),
    "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    "limit": no_attention,
}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)).

    References: Touvron et al., https://arxiv.org/abs/2302.13971;
    Shazeer, "GLU variants", https://arxiv.org/abs/2002.05202
    """

    def __init__(self, config: ModelConfig, attention: str, *, rngs: nnx.Rngs):
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=jnp.dtype(config.dtype), rngs=rngs
        )
        norm = functools.partial(
            nnx.RMSNorm, config.d_model, epsilon=1e-5, dtype=jnp.dtype(config.dtype), rngs=rngs
        )
        self.attention_norm = norm()
        self.attention = jax_flash.flax.GroupedQueryAttention(
            config.d_model,
            config.heads,
            config.kv_heads,
            config.head_dim,
            rotary=jax_flash.flax.Rotary(theta=config.rope_theta),
            is_causal=config.causal,
            dtype=jnp.dtype(config.dtype),
            attention_fn=ATTENTIONS[attention],
            rngs=rngs,
        )
        self.ffn_norm = norm()
        self.gate = linear(config.d_model, config.ffn)
        self.up = linear(config.d_model, config.ffn)
        self.down = linear(config.ffn, config.d_model)

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), input_positions=positions)
        y = self.ffn_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """Maps tokens [batch, seq] to logits over bytes: embedding, blocks, norm, output projection.

    positions [seq] are those of the tokens, if these are not in order.
    """

    def __init__(self, config: ModelConfig, attention: str, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.dtype)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=self.dtype, rngs=rngs)
        as_embedding = nnx.initializers.variance_scaling(1.0, "fan_out", "normal")
        self.embed = linear(VOCABULARY, config.d_model, kernel_init=as_embedding)
        self.blocks = nnx.List([Block(config, attention, rngs=rngs) for _ in range(config.blocks)])
        self.norm = nnx.RMSNorm(config.d_model, epsilon=1e-5, dtype=self.dtype, rngs=rngs)
        self.head = linear(config.d_model, VOCABULARY)

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        x = self.embed(jax.nn.one_hot(tokens, VOCABULARY, dtype=self.dtype))
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x)).astype(jnp.float32)


class TrainState(NamedTuple):
    """Holds the state that a training step replaces.

    Attributes:
      params: in the dtype of the computation.
      masters: the same in float32, as the optimizer has them.
      optimizer: its state, of the masters.
    """

    params: nnx.State
    masters: nnx.State
    optimizer: optax.OptState


def cast(tree: Any, dtype: Any) -> Any:
    """Returns the tree with every array converted to a dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def init_params(config: ModelConfig, seed: int = 0) -> nnx.State:
    """Returns parameters in float32; they do not depend on the attention."""

    @jax.jit
    def init(key):
        return nnx.state(Llama(config, "xla", rngs=nnx.Rngs(key)), nnx.Param)

    return init(jax.random.key(seed))


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: int = 0
) -> TrainState:
    """Returns the state before the first step."""

    @jax.jit
    def init():
        masters = init_params(config, seed)
        return TrainState(cast(masters, config.dtype), masters, optimizer.init(masters))

    return init()


def make_forward(config: ModelConfig, attention: str) -> Callable[..., jax.Array]:
    """Returns (params, tokens, *positions) -> logits, a pure function, for an attention."""
    model = nnx.eval_shape(lambda: Llama(config, attention, rngs=nnx.Rngs(0)))
    graph = nnx.graphdef(model)
    return lambda params, *tokens: nnx.merge(graph, params)(*tokens)


def make_loss(config: ModelConfig, attention: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns (params, text [batch, seq + 1]) -> (mean next-byte cross entropy in nats, logits)."""
    forward = make_forward(config, attention)

    def loss(params, text):
        logits = forward(params, text[:, :-1])
        labels = jax.nn.one_hot(text[:, 1:], VOCABULARY)  # as in the embedding: no scatter
        return optax.softmax_cross_entropy(logits, labels).mean(), logits

    return loss


def make_train_step(
    config: ModelConfig, attention: str, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]:
    """Returns the function (state, text [batch, seq + 1]) -> (state, loss)."""
    loss = make_loss(config, attention)

    def train_step(state, text):
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, text)
        gradients = cast(gradients, jnp.float32)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.masters)
        masters = optax.apply_updates(state.masters, updates)
        return TrainState(cast(masters, config.dtype), masters, optimizer_state), value

    return train_step


def make_attention_chain(config: ModelConfig, attention: str) -> tuple[Callable, Callable]:
    """Returns the attention calls alone of a forward pass and of a training step.

    They form a chain of as many calls as there are blocks; an output is the next call's query.

    Returns:
      (query, keys, values) -> output and (query, keys, values, doutput) -> gradients of the
      three; query, output and doutput [batch, seq, heads, head_dim], keys and values one array
      [batch, seq, kv_heads, head_dim] a block.
    """

    def forward(query, keys, values):
        for key, value in zip(keys, values, strict=True):
            query = ATTENTIONS[attention](query, key, value, is_causal=config.causal)
        return query

    def both(query, keys, values, doutput):
        return jax.vjp(forward, query, keys, values)[1](doutput)

    return forward, both


def load_text(path: str | None) -> np.ndarray:
    """Returns a file's bytes, or half a megabyte of English from Python's own documentation."""
    if path is not None:
        return np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def sample_text(text: np.ndarray, config: ModelConfig, seed: int) -> np.ndarray:
    """Returns int32 [batch, seq + 1]: pieces of text from places chosen by the seed."""
    starts = np.random.default_rng(seed).integers(len(text) - config.seq, size=config.batch)
    return np.stack([text[start : start + config.seq + 1] for start in starts]).astype(np.int32)
