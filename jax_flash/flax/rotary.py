"""Rotates queries and keys by their positions, in the ways that published models do."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.arrays import accumulator_of, float_array, integers, saturate
from jax_flash.spec import flag, is_number


class Scaling(Protocol):
    """Sets the frequencies of a `Rotary`. Objects are static, so they must be hashable.

    Attributes:
      magnitude: factor on the rotated features of query and of key.
    """

    @property
    def magnitude(self) -> float: ...

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        """Radians by which each of dim / 2 pairs turns per position, float64 [dim / 2]."""
        ...


def plain_frequencies(theta: float, dim: int) -> np.ndarray:
    """Returns theta ** (-2 c / dim) for c = 0, 1, ..., dim / 2 - 1."""
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Interpolates positions: each counts as if it were divided by `factor`.

    Gemma 3's global layers take a factor of 8. `rope_type` "linear" of Hugging Face.

    References: Chen et al., https://arxiv.org/abs/2306.15595
    """

    factor: float
    magnitude = 1.0

    def __post_init__(self):
        _check_positive(self, "factor")

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        return plain_frequencies(theta, dim) / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Scales as LLaMA 3.1 does: slow pairs are interpolated, fast ones are left alone.

    A pair that turns r times within `original_length` positions is divided by `factor` if r is
    below `low_freq_factor`, unchanged if r is above `high_freq_factor`, and a mixture, linear in
    r, between them. `rope_type` "llama3" of Hugging Face; defaults are LLaMA 3.1's, and LLaMA
    3.2's factor is 32.

    Attributes:
      original_length: tokens, the context before scaling (Hugging Face:
        `original_max_position_embeddings`).

    References: apply_scaling in https://github.com/meta-llama/llama-models,
      models/llama3/model.py
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    magnitude = 1.0

    def __post_init__(self):
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_length")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "high_freq_factor must be greater than low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        plain = plain_frequencies(theta, dim)
        turns = self.original_length * plain / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _mix(plain, self.factor, np.clip(kept, 0, 1))


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Scales as YaRN does: slow pairs are interpolated, fast ones are not; logits are sharpened.

    A pair that turns less than `beta_slow` times within `original_length` positions is divided by
    `factor`, one that turns more than `beta_fast` times is unchanged. Between them lies a mixture
    that is linear in the pair's number, as in the authors' code and in `rope_type` "yarn" of
    Hugging Face. (The paper's section 3.2 makes it linear in the number of turns.)

    Attributes:
      original_length: tokens, the context before scaling (Hugging Face:
        `original_max_position_embeddings`).
      truncate: whether the first and last pair of the mixture are rounded outwards to whole
        numbers. GPT-OSS does not.
      attention_factor: factor on the rotated features of query and of key. Default:
        0.1 ln(factor) + 1, or 1 for a factor of at most 1. For a configuration with `mscale` a
        and `mscale_all_dim` b it is (0.1 a ln(factor) + 1) / (0.1 b ln(factor) + 1).

    References: Peng et al., https://arxiv.org/abs/2309.00071, sections 3.2 to 3.4
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self):
        _check_positive(self, "factor", "original_length", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            _check_positive(self, "attention_factor")
        flag("truncate", self.truncate)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast must be at least beta_slow, got {self.beta_fast} and {self.beta_slow}"
            )

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(max(self.factor, 1)) + 1

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        if theta <= 1:  # all pairs would turn alike, or the later ones faster
            raise ValueError(f"theta must be greater than 1 with a YarnScaling, got {theta}")

        def pair(turns):
            """Returns the pair, as a real number, that turns this often in the original length."""
            wavelength = self.original_length / turns
            return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The upper bound is that of the authors' code: of features, not of pairs.
        first, last = max(first, 0), min(last, dim - 1)
        # Where both are one pair, the mixture is a step behind it.
        interpolated = (np.arange(dim // 2) - first) / ((last - first) or 0.001)
        return _mix(plain_frequencies(theta, dim), self.factor, 1 - np.clip(interpolated, 0, 1))


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """Scales as Gemma 4 does: the fastest pairs turn as without it, the others do not turn.

    Unlike with `Rotary.fraction`, pairs and frequencies are those of the whole head. `rope_type`
    "proportional" of Hugging Face.

    Attributes:
      fraction: share of the pairs that turn (Hugging Face: `partial_rotary_factor`).
      factor: positions count as if divided by it.

    References: apply_rope in https://github.com/google-deepmind/gemma,
      gemma/gm/math/_positional_embeddings.py
    """

    fraction: float
    factor: float = 1.0
    magnitude = 1.0

    def __post_init__(self):
        _check_positive(self, "fraction", "factor")
        _check_share(self.fraction)

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        turning = np.arange(dim // 2) < int(self.fraction * dim // 2)
        return np.where(turning, plain_frequencies(theta, dim) / self.factor, 0)


def _mix(plain: np.ndarray, factor: float, kept: np.ndarray) -> np.ndarray:
    return kept * plain + (1 - kept) * plain / factor


def _check_positive(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not is_number(value):
            raise TypeError(f"{name}: expected a number, got {value!r}")
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def _check_share(fraction: float) -> None:
    if fraction > 1:
        raise ValueError(f"fraction must be at most 1, got {fraction}")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Embeds positions by rotation: turns pairs of features by angles that grow with the position.

    Pair c of the `dim = int(fraction * head_dim)` features that turn is rotated by
    `position * theta ** (-2 * c / dim)` radians, unless `scaling` says otherwise. So logits
    depend on distances only. Angles are computed in float32.

        rotary = Rotary(theta=500000.0, scaling=Llama3Scaling())
        query, key = rotary(query, positions), rotary(key, positions)

    Attributes:
      theta: base of the wavelengths, which run from 2 pi to nearly 2 pi theta positions.
      fraction: share of each head's features, counted from the first, that turn; the others are
        left as they are. 0.5 in GLM, 0.25 in GPT-NeoX, 0.4 or 0.5 in Phi.
      interleaved: whether pair c consists of features 2 c and 2 c + 1, as in GPT-J, GLM and
        LLaMA's own checkpoints, rather than of c and c + dim / 2, as in GPT-NeoX and in Hugging
        Face's format.
      scaling: `LinearScaling`, `Llama3Scaling`, `YarnScaling`, `ProportionalScaling`, another
        `Scaling`, or None.

    References: Su et al., "RoFormer", https://arxiv.org/abs/2104.09864
    """

    theta: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self):
        _check_positive(self, "theta", "fraction")
        _check_share(self.fraction)
        flag("interleaved", self.interleaved)
        is_scaling = hasattr(self.scaling, "frequencies") and not isinstance(self.scaling, type)
        if self.scaling is not None and not is_scaling:
            raise TypeError(f"scaling must be a Scaling or None, got {self.scaling!r}")

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair, float64 [int(fraction * head_dim) / 2].

        Raises:
          ValueError: the number of features that turn is 0 or odd.
        """
        dim = int(self.fraction * head_dim)
        if dim == 0 or dim % 2:
            raise ValueError(
                "int(fraction * head_dim) must be positive and even, since features turn in "
                f"pairs, got {dim} from fraction={self.fraction} and head_dim={head_dim}"
            )
        if self.scaling is not None:
            return self.scaling.frequencies(self.theta, dim)
        return plain_frequencies(self.theta, dim)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates queries or keys.

        Args:
          x: [*batch, length, heads, head_dim], floating.
          positions: broadcastable to [*batch, length], integer.

        Returns:
          Like `x`.

        Raises:
          TypeError: `x` is not an array of floats, or `positions` not one of integers.
          ValueError: the number of features that turn is 0 or odd, or `x` has fewer than three
            axes, or `positions` does not fit.
        """
        x = of_heads("x", x)
        frequency = self.frequencies(x.shape[-1])
        dtype = accumulator_of(x.dtype)
        positions = with_rank(positions, x.shape[:-2])[..., None, None].astype(dtype)
        angle = positions * frequency.reshape((1,) * (x.ndim - 1) + (-1,)).astype(dtype)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        cos, sin = magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)

        turning, rest = jnp.split(x, [2 * len(frequency)], axis=-1)
        turning = turning.astype(dtype)
        if self.interleaved:
            pairs = turning.reshape(*turning.shape[:-1], len(frequency), 2)
            first, second = (jax.lax.index_in_dim(pairs, i, -1, keepdims=False) for i in range(2))
        else:
            first, second = jnp.split(turning, 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        if self.interleaved:
            turning = jnp.stack(turned, axis=-1).reshape(turning.shape)
        else:
            turning = jnp.concatenate(turned, axis=-1)
        return jnp.concatenate([turning.astype(x.dtype), rest], axis=-1)


def of_heads(name: str, x: jax.Array) -> jax.Array:
    """Returns queries or keys, an argument that must be floats [*batch, length, heads, head_dim].

    Raises:
      TypeError: it is not an array of floats.
      ValueError: it has fewer than three axes.
    """
    x = float_array(name, x)
    if x.ndim < 3:
        raise ValueError(f"{name}: expected shape [*batch, length, heads, head_dim], got {x.shape}")
    return x


def with_rank(positions: jax.Array, shape: tuple[int, ...], name: str = "positions") -> jax.Array:
    """Gives positions, int, as many axes as `shape`, to which they must broadcast."""
    positions = saturate(integers(name, positions))
    padded = (1,) * (len(shape) - positions.ndim) + positions.shape
    if len(padded) != len(shape) or any(
        size not in (1, full) for size, full in zip(padded, shape, strict=True)
    ):
        raise ValueError(
            f"{name} must broadcast to [*batch, length] = {shape}, got {positions.shape}"
        )
    return positions.reshape(padded)
