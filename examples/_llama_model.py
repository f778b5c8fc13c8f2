"""A small LLaMA in flax.nnx whose attention can be exchanged, and bytes of text to feed it."""

import dataclasses
import functools
import pathlib
import pydoc_data.topics
from collections.abc import Callable

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
    dtype: str  # of the computation; parameters are float32
    rope_theta: float = 10000.0

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


# The width of the published models and a few of their blocks: a block costs the same wherever it
# stands, so depth adds time and memory but no information. `cpu` is sized for two cores.
PRESETS = {
    "cpu": ModelConfig(
        blocks=2, d_model=256, heads=4, kv_heads=2, head_dim=64, ffn=704, seq=2048, batch=1,
        dtype="float32",
    ),
    "7b": ModelConfig(
        blocks=2, d_model=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, seq=2048, batch=4,
        dtype="bfloat16",
    ),
    "8b": ModelConfig(
        blocks=2, d_model=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, seq=8192, batch=1,
        dtype="bfloat16", rope_theta=500000.0,
    ),
}  # fmt: skip

ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "jax_flash": jax_flash.dot_product_attention,
    "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
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
        dtype = jnp.dtype(config.dtype)
        self.embed = nnx.Embed(VOCABULARY, config.d_model, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, attention, rngs=rngs) for _ in range(config.blocks)])
        self.norm = nnx.RMSNorm(config.d_model, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(config.d_model, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x)).astype(jnp.float32)


def init_params(config: ModelConfig, seed: int = 0) -> nnx.State:
    """Parameters; they do not depend on the attention."""

    @jax.jit
    def init(key):
        return nnx.state(Llama(config, "xla", rngs=nnx.Rngs(key)), nnx.Param)

    return init(jax.random.key(seed))


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
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return losses.mean(), logits

    return loss


def make_train_step(
    config: ModelConfig, attention: str, optimizer: optax.GradientTransformation
) -> Callable[..., tuple]:
    """(params, optimizer state, text) -> (params, optimizer state, loss)."""
    loss = make_loss(config, attention)

    def train_step(params, state, text):
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(params, text)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return train_step


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
