"""Medians, their bootstrap intervals, ratios of two series, and what counts as a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.stats

NOISY = 0.02  # of the median: a standard deviation above it is flagged
RESAMPLES = 2000
COVERAGE = 0.95


def _interval(data: tuple[np.ndarray, ...], statistic: Callable, *, paired=False) -> list[float]:
    """The percentile bootstrap's interval for a statistic of one or two series.

    See Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13. The seed is
    fixed, so that the same times give the same interval. That of single times is a point.
    """
    if min(series.size for series in data) < 2:
        return [float(statistic(*data, axis=-1))] * 2
    found = scipy.stats.bootstrap(
        data, statistic, n_resamples=RESAMPLES, confidence_level=COVERAGE, paired=paired,
        method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    return [float(end) for end in found.confidence_interval]


def _ratio(times: np.ndarray, others: np.ndarray, axis: int) -> Any:
    return np.median(others, axis) / np.median(times, axis)


def summarize(times: Sequence[float]) -> dict[str, Any]:
    """Of times in seconds: median, 95% bootstrap interval for it, standard deviation, flag."""
    series = np.asarray(times, np.float64)
    if series.size == 0:
        raise ValueError("summarize: expected at least one time, got none")
    median = float(np.median(series))
    std = float(series.std(ddof=1)) if series.size > 1 else 0.0
    return {
        "calls": int(series.size),
        "median_s": median,
        "interval_s": _interval((series,), np.median),
        "std_s": std,
        "noisy": std > NOISY * median,
    }


def disjoint(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two closed intervals have no point in common."""
    return a[1] < b[0] or b[1] < a[0]


def compare(times: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """How much faster `times` is than `others`: the ratio of medians, others' over times'.

    Series of one length were measured in turn, round by round: the same rounds are drawn for
    both, so that what disturbed a round does not widen the ratio's interval.
    """
    a, b = np.asarray(times, np.float64), np.asarray(others, np.float64)
    return {
        "ratio": float(_ratio(a, b, axis=-1)),
        "interval": _interval((a, b), _ratio, paired=a.size == b.size),
        "disjoint": disjoint(summarize(times)["interval_s"], summarize(others)["interval_s"]),
    }


def regression(new: dict[str, Any], old: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """A change between two summaries of different runs, and whether it is a regression.

    Intervals say how well one run knows its median, and nothing of how runs differ (clocks,
    memory placement): beyond noise is a change whose intervals are disjoint and which exceeds
    `tolerance`, a fraction, or both runs' standard deviations of the median where these are
    larger.
    """
    ratio = new["median_s"] / old["median_s"]
    spread = math.hypot(
        *(3 * s["std_s"] / s["median_s"] / math.sqrt(s["calls"]) for s in (new, old))
    )
    beyond = disjoint(new["interval_s"], old["interval_s"]) and abs(ratio - 1) > max(
        tolerance, spread
    )
    return {"ratio": ratio, "beyond_noise": beyond, "regression": beyond and ratio > 1}
