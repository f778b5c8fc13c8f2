"""A small LLaMA in flax.nnx whose attention can be exchanged, and bytes of text to feed it.

What is not a block is kept cheap and steady, so that a measurement is one of blocks: the embedding
is a product with one-hot rows, whose gradient is a product too (a lookup's is a scatter in which
all tokens add to 256 rows, and which takes longer than attention).

Training is in mixed precision, as usual on accelerators: the blocks read parameters in the dtype of
the computation, their gradients come in the same dtype, and the optimizer keeps float32 masters
and moments, which it updates in float32 and rounds once a step to the next step's parameters.
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
    """Sizes of a model and of the batches it runs on; names as in the LLaMA papers."""

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

# The width of the published models and as many of their blocks as train on a GPU with 80 GB: a
# block costs the same wherever it stands, so depth adds time and memory but no information.
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
    """The limit of what attention can gain: reads the operands, writes a result, and no more.

    query [B,T,N,H], key and value [B,T,K,H] of one head dim, so that they can be added; without
    query and key in the sum, XLA would leave out their projections as well.
    """
    groups = query.shape[-2] // key.shape[-2]
    return query + jnp.repeat(key + value, groups, axis=-2)


ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "jax_flash": jax_flash.dot_product_attention,
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
    """Embedding, blocks, norm, output projection: tokens [batch, seq] to logits over bytes.

    positions [seq]: of the tokens, where they are not in order.
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
    """What a training step replaces.

    Attributes:
      params: in the dtype of the computation.
      masters: the same in float32, as the optimizer has them.
      optimizer: its state, of the masters.
    """

    params: nnx.State
    masters: nnx.State
    optimizer: optax.OptState


def cast(tree: Any, dtype: Any) -> Any:
    """The same tree with every array in a dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def init_params(config: ModelConfig, seed: int = 0) -> nnx.State:
    """Parameters in float32; they do not depend on the attention."""

    @jax.jit
    def init(key):
        return nnx.state(Llama(config, "xla", rngs=nnx.Rngs(key)), nnx.Param)

    return init(jax.random.key(seed))


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: int = 0
) -> TrainState:
    """The state before the first step."""

    @jax.jit
    def init():
        masters = init_params(config, seed)
        return TrainState(cast(masters, config.dtype), masters, optimizer.init(masters))

    return init()


def make_forward(config: ModelConfig, attention: str) -> Callable[..., jax.Array]:
    """The pure function (params, tokens, *positions) -> logits of a model with that attention."""
    model = nnx.eval_shape(lambda: Llama(config, attention, rngs=nnx.Rngs(0)))
    graph = nnx.graphdef(model)
    return lambda params, *tokens: nnx.merge(graph, params)(*tokens)


def make_loss(config: ModelConfig, attention: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(params, text [batch, seq + 1]) -> mean cross entropy of the next byte in nats, logits."""
    forward = make_forward(config, attention)

    def loss(params, text):
        logits = forward(params, text[:, :-1])
        labels = jax.nn.one_hot(text[:, 1:], VOCABULARY)  # as in the embedding: no scatter
        return optax.softmax_cross_entropy(logits, labels).mean(), logits

    return loss


def make_train_step(
    config: ModelConfig, attention: str, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]:
    """(state, text [batch, seq + 1]) -> (state, loss)."""
    loss = make_loss(config, attention)

    def train_step(state, text):
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, text)
        gradients = cast(gradients, jnp.float32)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.masters)
        masters = optax.apply_updates(state.masters, updates)
        return TrainState(cast(masters, config.dtype), masters, optimizer_state), value

    return train_step


def make_attention_chain(config: ModelConfig, attention: str) -> tuple[Callable, Callable]:
    """The attention calls of a forward pass and of a training step, without the rest of the model.

    As many in a chain as there are blocks, where an output is the next call's query.

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
    """The bytes of a file, or half a megabyte of English from Python's own documentation."""
    if path is not None:
        return np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def sample_text(text: np.ndarray, config: ModelConfig, seed: int) -> np.ndarray:
    """[batch, seq + 1] int32: stretches of text from places chosen by the seed."""
    starts = np.random.default_rng(seed).integers(len(text) - config.seq, size=config.batch)
    return np.stack([text[start : start + config.seq + 1] for start in starts]).astype(np.int32)
