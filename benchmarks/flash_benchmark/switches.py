"""The switches of the kernels' configurations: the one table that the ablation is made from.

A switch is a macro with the shipped value as its default, in cuda/plan/recipes.h, in the config.cuh
of its family and pass or, in code that both families share, in cuda/tile/:

    #ifndef JAX_FLASH_SM90_OPTIMISTIC
    #define JAX_FLASH_SM90_OPTIMISTIC 1
    #endif
    static constexpr bool kOptimistic = JAX_FLASH_SM90_OPTIMISTIC && kStages >= 3;

so that it is compiled in, and nothing of it runs in the library that is shipped. A new switch is
that macro and a row here. Values that do not compile, or spill, say so in the table.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Switch:
    """One macro and the values to try.

    Attributes:
      family: 80 or 90.
      what: the pass, "forward" or "backward".
      macro: its name.
      values: as the compiler takes them; the shipped one among them is left out of the table.
      about: what it changes, for the table.
      head_dims: of the instances that have it.
    """

    family: int
    what: str
    macro: str
    values: tuple[str, ...]
    about: str
    head_dims: tuple[int, ...] = (32, 64, 96, 128, 192, 256)

    @property
    def name(self) -> str:
        return self.macro.removeprefix(f"JAX_FLASH_SM{self.family}_").lower()


def _sm80(what: str, name: str, values, about: str, **more) -> Switch:
    return Switch(80, what, f"JAX_FLASH_SM80_{name}", tuple(map(str, values)), about, **more)


def _sm90(what: str, name: str, values, about: str, **more) -> Switch:
    return Switch(90, what, f"JAX_FLASH_SM90_{name}", tuple(map(str, values)), about, **more)


SWITCHES: tuple[Switch, ...] = (
    _sm80("forward", "FORWARD_STAGES", (1, 2), "tiles of K and of V under way"),
    _sm80("forward", "FORWARD_QUERY_IN_REGISTERS", (0, 1), "Q fragments kept, not read again"),
    _sm80("forward", "FORWARD_INTERLEAVED", (0, 1), "exponentials among the products of P V"),
    _sm80("forward", "RESCALE_SLACK", ("0.0f", "8.0f"), "rescale only above 2^this (lazy)"),
    _sm80("forward", "SWIZZLE", (0, 1), "XOR swizzle of shared memory"),
    _sm80("forward", "FORWARD_LONGEST_FIRST", (0, 1), "last query tiles first"),
    _sm80("forward", "FORWARD_BLOCK_KV", (32, 64, 128), "keys a tile"),
    _sm80("forward", "FORWARD_BLOCK_Q", (64, 128), "queries a block"),
    _sm80("forward", "FORWARD_WARPS", (4, 8), "warps a block, of 32 or 16 rows each"),
    _sm80("backward", "BACKWARD_STAGES", (1,), "tiles of Q and of dO under way"),
    _sm80("backward", "BACKWARD_BLOCK_KV", (64, 128), "keys a block"),
    _sm80("backward", "BACKWARD_MIN_BLOCKS", (1, 2, 3), "blocks an SM that registers are cut for",
          head_dims=(32, 64)),
    _sm80("backward", "SWIZZLE", (0, 1), "XOR swizzle of shared memory"),
    _sm90("forward", "QUERY_STAGES", (1, 2), "query tiles under way", head_dims=(64, 96, 128)),
    _sm90("forward", "SPLIT_KEYS", (0, 1), "few tiles: keys divided among warpgroups",
          head_dims=(64, 96, 128)),
    _sm90("forward", "SCORES_AHEAD", (0, 1), "few tiles: scores of the next tile in registers, too",
          head_dims=(64, 96, 128)),
    _sm90("forward", "OPTIMISTIC", (0, 1), "exponentials before the row maxima are known"),
    _sm90("forward", "CONVERT_VALUES", (0, 1), "bfloat16: every second tile of P and V in float16",
          head_dims=(64, 96, 128)),
    _sm90("forward", "PAIRED", (0, 1), "causal: long and short query tiles in pairs"),
    _sm90("forward", "LONG_UNIT", ("0", "(32768 * 256)", "(1 << 30)"),
          "keys times head dim from which on blocks are not persistent"),
    _sm90("forward", "REST_APART", (0, 1), "units left over as blocks of their own"),
    _sm90("forward", "OUT_PARTS_64", (1, 2, 4), "parts of P V among exponentials", head_dims=(64,)),
    _sm90("forward", "OUT_PARTS", (1, 2, 4), "parts of P V among exponentials",
          head_dims=(96, 128, 192, 256)),
    _sm90("backward", "BWD_KEYS_IN_REGISTERS", (0, 1), "K fragments kept, not read again"),
    _sm90("backward", "BWD_NEXT_SCORES_FIRST", (0, 1), "the next S issued before dQ"),
    _sm90("backward", "BWD_EARLY_LSE", (0, 1), "lse read before S is there"),
    _sm90("backward", "BWD_LONGEST_FIRST", (0, 1), "causal: longest key tiles first"),
    _sm90("backward", "BWD_DEPENDENT_LAUNCH", (0, 1), "kernels chained by dependent launch"),
)  # fmt: skip


def select(family: int, what: str, head_dim: int, names: list[str] | None = None) -> list[Switch]:
    """The switches of a kernel, or of these names."""
    return [
        switch
        for switch in SWITCHES
        if (switch.family, switch.what) == (family, what)
        and head_dim in switch.head_dims
        and (names is None or switch.name in names)
    ]
