"""The benchmark's statistics, oracle, tables and files are right, and short runs of it work."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from flash_benchmark import oracle, peers, report, speed, stats, timing
from flash_benchmark.cases import FEATURES, PEAKED, Case, make_inputs, options
from flash_benchmark.contenders import JaxContender, UnavailableError
from flash_benchmark.switches import SWITCHES
from flash_benchmark.tables import TABLES, select

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_FLASH = JaxContender(
    "jax_flash", lambda case: lambda *x, **more: jax_flash.dot_product_attention(
        *x, **more, **options(case)
    )
)  # fmt: skip


def tiny(**changes) -> Case:
    return dataclasses.replace(Case("tiny", 2, 40, 4, 16, kv_heads=2, dtype="float32"), **changes)


def test_summary_of_known_times():
    summary = stats.summarize(list(range(1, 101)))
    assert summary["median_s"] == 50.5
    low, high = summary["interval_s"]
    # Between the 40th and the 61st, by the binomial distribution of the ranks.
    assert 38 <= low <= 43
    assert 58 <= high <= 63
    assert summary["noisy"]
    assert not stats.summarize([1.0, 1.001, 0.999])["noisy"]
    assert stats.summarize([2.0])["interval_s"] == [2.0, 2.0]


def test_bootstrap_interval_covers_the_median():
    generator = np.random.default_rng(0)
    covered = [
        (low <= 1.0 <= high, high - low)
        for low, high in (
            stats.summarize(generator.normal(1, 0.1, 50))["interval_s"] for _ in range(200)
        )
    ]
    # 95% of 200, and no interval is so wide that it could not miss.
    assert 180 <= sum(hit for hit, _ in covered) <= 199
    assert max(width for _, width in covered) < 0.12


def test_ratio_of_paired_series_ignores_what_both_suffer():
    disturbance = np.random.default_rng(1).uniform(1, 3, 100)
    found = stats.compare(disturbance, 2 * disturbance)
    assert found["ratio"] == pytest.approx(2)
    assert found["interval"] == pytest.approx([2, 2])
    assert stats.compare(disturbance, 2 * disturbance[:-1])["interval"][1] > 2.1  # not paired
    apart = stats.compare(np.linspace(1, 1.1, 50), np.linspace(2, 2.1, 50))
    assert apart["disjoint"]
    assert not stats.compare(np.linspace(1, 1.1, 50), np.linspace(1, 1.1, 50)[::-1])["disjoint"]


def test_activities_belong_to_the_call_in_whose_span_they_fall():
    spans = {0: (0.0, 100.0), 1: (110.0, 200.0), 2: (210.0, 300.0)}
    # Two that overlap by 5 count once there; one of call 1; one between calls, nobody's.
    activities = [(10.0, 30.0), (25.0, 40.0), (120.0, 130.0), (202.0, 206.0)]
    assert timing.attribute(spans, activities) == pytest.approx({0: 30e-9, 1: 10e-9})


def test_every_round_calls_everyone_once():
    plan = timing.schedule(["a", "b", "c"], 20)
    rounds = [plan[i : i + 3] for i in range(0, 60, 3)]
    assert all({key for key, _ in one} == {"a", "b", "c"} for one in rounds)
    assert len({tuple(key for key, _ in one) for one in rounds}) > 1


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (tiny(), 1600),
        (tiny(is_causal=True), 800),
        (tiny(window=(3, 0)), 4 * 40 - 6),
        (tiny(segments=4), 400),
        (tiny(segments=4, is_causal=True), 4 * 55),
        (tiny(documents=4), 17 * 17 + 23 * 23),
    ],
    ids=lambda x: x.mask_name if isinstance(x, Case) else "",
)
def test_work_is_that_of_the_allowed_pairs(case, pairs):
    assert case.allowed_pairs() == pairs
    assert case.flops("forward") == 4 * 2 * 4 * 16 * pairs
    assert case.flops("both") == 3.5 * case.flops("forward")


def test_work_counts_both_head_dims():
    case = tiny(value_dim=48)
    assert case.name == "(2,40,4/2,16/48) float32 full"
    assert case.flops("forward") == 2 * (16 + 48) * 2 * 4 * 40 * 40
    # Query and output, key and value; in the backward pass also the gradients of all four.
    assert case.bytes("forward") == 4 * 2 * 40 * (4 + 2) * (16 + 48)
    assert case.bytes("both") == 3 * case.bytes("forward")


_CASES = [
    tiny(), tiny(is_causal=True), tiny(window=(5, 2)), tiny(segments=3),
    tiny(documents=5, is_causal=True), tiny(documents=5, q_len=23, is_causal=True),
    tiny(value_dim=24, is_causal=True), tiny(is_causal=True, feature="bias_gradient"),
    tiny(segments=3, is_causal=True, feature="soft_cap"), tiny(window=(5, 0), feature="sinks"),
    tiny(feature="mask+soft_cap"),
    *(tiny(feature=feature) for feature in FEATURES if feature != "dropout"),
]  # fmt: skip


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_oracle_agrees_and_notices(case):
    inputs, extras = make_inputs(case, 0)
    truth = oracle.compute(case, inputs, extras)
    prepared = _FLASH.prepare(case, [inputs], extras)
    assert not prepared.refused
    results = prepared.results("both")
    found = oracle.errors(case, truth, results)
    assert tuple(found) == case.results("both")
    assert max(found.values()) < 1e-5
    assert not oracle.is_wrong(case, found)
    for name in results:
        spoiled = {**results, name: results[name] * 1.01}
        assert oracle.is_wrong(case, oracle.errors(case, truth, spoiled)), name
    assert oracle.is_wrong(case, {"out": float("nan")})


def test_gradient_of_a_bias_is_of_all_batch_entries():
    case = tiny(batch=3, is_causal=True, feature="bias_gradient")
    inputs, extras = make_inputs(case, 0)
    one = [x[:1] for x in inputs]
    truth = oracle.compute(case, inputs, extras)
    part = _FLASH.prepare(dataclasses.replace(case, batch=1), [one], extras).results("both")
    assert oracle.errors(case, truth, part)["dbias"] > 0.5


def _dropped(case, inputs, extras, **changes) -> dict[str, np.ndarray]:
    static = options(case) | changes
    build = JaxContender("", lambda case: lambda *x, **more: jax_flash.dot_product_attention(
        *x, **more, **static
    ))  # fmt: skip
    return build.prepare(case, [inputs], extras).results("both")


@pytest.mark.parametrize(
    ("causal", "feature"), [(False, "dropout"), (True, "dropout"), (False, "padding+dropout")]
)
def test_dropout_by_other_bits_is_told_from_wrong_dropout(causal, feature):
    q_len, kv_len = (512, 1024) if feature.startswith("padding") else (256, 256)
    case = tiny(batch=1, q_len=q_len, kv_len=kv_len, is_causal=causal, feature=feature)
    inputs, extras = make_inputs(case, 0)
    truth = oracle.compute(case, inputs, extras)
    right = _dropped(case, inputs, extras)
    found = oracle.errors(case, truth, right)
    assert tuple(found) == case.results("both")
    assert not oracle.is_wrong(case, found)
    other = extras | {"dropout_seed": extras["dropout_seed"] + 1}
    assert not oracle.is_wrong(case, oracle.errors(case, truth, _dropped(case, inputs, other)))
    faults = {rate: _dropped(case, inputs, extras, dropout_rate=rate) for rate in (0.0, 0.05, 0.2)}
    faults["not scaled"] = {name: 0.9 * x for name, x in right.items()}
    faults["half NaN"] = {name: x * np.where(x > 0, 1, np.nan) for name, x in right.items()}
    for fault, results in faults.items():
        for name, error in oracle.errors(case, truth, results).items():
            assert oracle.is_wrong(case, {name: error}), (fault, name)


def test_variance_by_dropout_is_that_of_many_seeds():
    case = tiny(batch=1, q_len=12, kv_len=12, is_causal=True, feature="dropout")
    inputs, extras = make_inputs(case, 0)
    truth = oracle.compute(case, inputs, extras)
    seeds = jax.random.bits(jax.random.key(1), (2000, 2), jnp.uint32)

    @jax.jit
    def results(seed):
        static = options(case)
        out, pullback = jax.vjp(
            lambda *x: jax_flash.dot_product_attention(
                *x, dropout_seed=seed, implementation="reference", **static
            ),
            *inputs[:3],
        )
        return out, *pullback(inputs[3])

    drawn = dict(
        zip(case.results("both"), jax.lax.map(results, seeds, batch_size=100), strict=True)
    )
    for name, index in truth.index.items():
        difference = np.asarray(drawn[name], np.float64)[:, -1][:, *index] - truth.values[name]
        expected = truth.variance[name]
        assert np.abs(difference.mean(0)).max() < 5 * np.sqrt(expected.max() / len(seeds)), name
        measured = (difference**2).sum(-1).mean(0)
        np.testing.assert_allclose(measured, expected, rtol=0.25, atol=1e-3 * expected.max())


@pytest.mark.parametrize(
    ("case", "keys"),
    [(tiny(), 0), (tiny(is_causal=True), 8), (tiny(window=(3, 0)), 5 + 5 + 8)],
    ids=lambda x: x.mask_name if isinstance(x, Case) else "",
)
def test_oracle_beyond_its_budget_takes_rows(monkeypatch, case, keys):
    monkeypatch.setattr(oracle, "BUDGET", 0)
    monkeypatch.setattr(oracle, "BLOCK", 8)
    inputs, extras = make_inputs(case, 0)
    truth = oracle.compute(case, inputs, extras)
    assert truth.values["out"].shape == (24, 2, 16)
    # Of keys, those that only the first, middle and last 8 queries may attend to.
    assert truth.values.keys() >= {"out", "dquery"}
    assert truth.values.get("dkey", np.zeros(0)).shape[0] == keys
    found = oracle.errors(case, truth, _FLASH.prepare(case, [inputs], extras).results("both"))
    assert max(found.values()) < 1e-5


def test_tables_name_cases_once():
    for name in TABLES:
        names = [case.name for case in select([name])]
        assert len(set(names)) == len(names) > 0, name
    assert len(select(["targets"])) == 18
    unequal = {case.name for case in select(list(TABLES)) if case.value_dim != case.head_dim}
    assert unequal == {f"(1,8192,16,192/128) bfloat16 {mask}" for mask in ("full", "causal")}


def test_pairs_have_what_models_combine():
    names = {case.name for case in select(["pairs"])}
    assert names >= {
        *(
            f"(4,4096,16,{dim}) bfloat16 {what}"
            for dim in (64, 128)
            for what in (
                "window 1023,0, soft_cap", "causal + 4 segments, soft_cap",
                "causal + 4 segments, bias", "causal + 4 segments, alibi", "full, mask+soft_cap",
                "full, mask+dropout",
            )
        ),
        "(2,8192,64/8,64) bfloat16 window 127,0, sinks",
        "(2,8192,64/8,64) bfloat16 window 1023,0, sinks",
    }  # fmt: skip


def test_training_has_what_models_train_with():
    names = {case.name for case in select(["training"])}
    assert names >= {
        f"({shape}) bfloat16 {mask}"
        for shape, masks in {
            "4,4096,16,128": ("full", "causal", "4 segments", "causal + 4 segments",
                              "full, soft_cap", "causal, soft_cap", "full, mask", "full, bias",
                              "full, bias_gradient", "full, dropout", "causal, dropout"),
            "4,4096,16,64": ("full", "causal", "4 segments", "causal + 4 segments",
                             "full, soft_cap", "full, mask", "full, bias_gradient",
                             "full, dropout"),
            "1,8192,16,192/128": ("full", "causal"),
            "2,8192,8,256": ("full", "causal"),
            "1,4096,64/8,128": ("causal",),
            "1,1536,40/8,128": ("full", "causal"),
            "1,2048,32/8,128": ("causal",),
            "2,6144,24/6,96": ("causal",),
            "32,256,8,64": ("causal",),
            "1,16384,16,128": ("full",),
        }.items()
        for mask in masks
    }  # fmt: skip


def test_who_is_wrong_is_nobodys_best_peer():
    case = tiny(passes=("forward",))
    half = JaxContender("half", lambda case: lambda q, k, v: q / 2)
    xla = JaxContender("jax.nn xla", lambda case: jax.nn.dot_product_attention)

    def refuse(case):
        raise UnavailableError("does not want to")

    settings = speed.Settings(timing.WallTimer(), warmup=1, calls=3, cold=True)
    everyone = [_FLASH, half, xla, JaxContender("none", refuse)]
    rows = {row["contender"]: row for row in speed.measure_case(case, everyone, settings)}
    assert rows["half"]["wrong"]
    assert not rows["jax_flash"]["wrong"]
    assert rows["jax_flash"]["best_peer"]["name"] == "jax.nn xla"
    assert rows["none"]["unavailable"] == "does not want to"
    assert rows["jax_flash"]["inputs"] > 1
    text = report.format_case(list(rows.values()), {}, "float32")
    assert "WRONG" in text
    assert "none: does not want to" in text


def test_features_take_turns_with_the_plain_call():
    settings = speed.Settings(timing.WallTimer(), warmup=0, calls=2, passes=("forward",))
    plain = tiny(group="tiny-features")
    cases = [plain, dataclasses.replace(plain, feature="soft_cap")]
    found = [rows[0] for rows in speed.measure_cases(cases, [_FLASH], settings)]
    assert ["over_plain" in row for row in found] == [False, True]
    assert not any(row["wrong"] for row in found)
    assert found[1]["over_plain"]["ratio"] > 0


def test_what_is_in_the_inputs_is_not_in_those_of_the_plain_call():
    plain = tiny(group="tiny-features")
    peaked = dataclasses.replace(plain, feature="peaked")
    inputs = [make_inputs(peaked, 0)[0]]

    class Recorder:
        name = "jax_flash"

        def prepare(self, case, inputs, extras):
            return case, inputs[0]

    case, used = speed._prepare_plain(peaked, [Recorder()], inputs)
    assert case == plain
    for of_peaked, of_plain, factor in zip(inputs[0], used, (PEAKED, PEAKED, 1, 1), strict=True):
        np.testing.assert_allclose(of_peaked, factor * of_plain, rtol=1e-6)


def test_segments_are_compared_with_as_many_sequences():
    case = tiny(group="tiny-features", segments=2, is_causal=True)
    plain = case.plain()
    assert plain == dataclasses.replace(
        tiny(group="tiny-features", is_causal=True), batch=2 * case.batch, q_len=case.q_len // 2,
        kv_len=case.kv_len // 2,
    )  # fmt: skip
    assert plain.flops("forward") == pytest.approx(case.flops("forward"), rel=0.1)
    settings = speed.Settings(timing.WallTimer(), warmup=0, calls=2, passes=("forward",))
    (row,) = next(speed.measure_cases([case], [_FLASH], settings))
    assert row["over_plain"]["ratio"] > 0


def test_who_takes_long_to_compile_is_left_out_of_later_cases():
    cases = [tiny(q_len=8 * n) for n in (1, 2, 3)]
    xla = JaxContender("jax.nn xla", lambda case: jax.nn.dot_product_attention)
    settings = speed.Settings(
        timing.WallTimer(), warmup=0, calls=1, passes=("forward",), setup_limit=0.0
    )
    found = list(speed.measure_cases(cases, [_FLASH, xla], settings))
    assert [[row["contender"] for row in rows] for rows in found] == 3 * [["jax_flash", xla.name]]
    assert all("time" in rows[0] for rows in found)
    assert "time" in found[1][1]  # the first case, which may import, is no reason
    assert "to compile" in found[2][1]["unavailable"]
    assert not list(speed.measure_cases(cases, [_FLASH], settings, lambda: True))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there the peers run")
def test_peers_say_why_they_do_not_run():
    inputs, extras = make_inputs(tiny(), 0)
    for contender in peers.all_peers():
        try:
            reasons = contender.prepare(tiny(), [inputs], extras).refused.values()
        except UnavailableError as error:
            reasons = [str(error)]
        assert set(reasons) == {"runs on NVIDIA GPUs only"}


def test_noise_is_no_regression():
    steady = {"median_s": 1.0, "interval_s": [0.99, 1.01], "std_s": 0.01, "calls": 100}

    def slower(by, std=0.01):
        return {"median_s": by, "interval_s": [by - 0.005, by + 0.005], "std_s": std, "calls": 100}

    assert stats.regression(slower(1.1), steady, 0.02)["regression"]
    assert not stats.regression(slower(1.1), steady, 0.15)["regression"]
    assert not stats.regression(slower(1.1, std=0.5), steady, 0.02)["regression"]
    faster = stats.regression(slower(0.8), steady, 0.02)
    assert faster["beyond_noise"]
    assert not faster["regression"]


def test_switches_are_in_the_sources_and_the_other_way_round():
    text = "".join(p.read_text() for p in (_ROOT / "cuda").rglob("*") if p.suffix in (".h", ".cuh"))
    macros = set(re.findall(r"#ifndef (JAX_FLASH_SM\d+_\w+)\n", text))
    assert macros == {switch.macro for switch in SWITCHES}


def test_inputs_are_normal_and_repeatable():
    first, second = (make_inputs(tiny(), 3)[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert jnp.array_equal(a, b)
        assert 0.8 < float(a.std()) < 1.2
