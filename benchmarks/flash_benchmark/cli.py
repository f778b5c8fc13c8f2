"""The command line: speed (the default), profile, ablation, host, plots."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import time

import jax

from flash_benchmark import environment, peak, report, speed, timing
from flash_benchmark.cases import PASSES, Case
from flash_benchmark.contenders import all_contenders
from flash_benchmark.layer import LAYERS, measure_layer
from flash_benchmark.tables import TABLES, select
from jax_flash import ffi

COMMANDS = {
    "speed": "times attentions beside each other (the default)",
    "profile": "where a kernel's time goes, by Nsight Compute",
    "ablation": "what each switch of the kernels' configurations is worth",
    "host": "tracing, lowering, dispatch and import",
    "plots": "draws the results of a file",
}


def main(argv: list[str]) -> int:
    """Runs a command; returns the exit status."""
    command = argv[0] if argv and argv[0] in COMMANDS else "speed"
    if command != "speed":
        return importlib.import_module(f"flash_benchmark.{command}").main(argv[1:])
    return speed_command(argv[1:] if argv and argv[0] == command else argv)


def add_timing_options(add) -> None:
    """Those that every command has which times calls."""
    add("--timer", choices=("auto", "cupti", "wall"), default="auto",
        help="auto: CUPTI on GPUs where it works, else wall time")  # fmt: skip
    add("--warmup", type=int, default=20, help="untimed calls of each (default: %(default)s)")
    add("--calls", type=int, default=100, help="timed calls of each (default: %(default)s)")
    add("--seconds", type=float, metavar="S",
        help="fewer calls, 10 at least, where all calls of a case would take longer")  # fmt: skip
    add("--commit", help="of the sources, where this does not run from a checkout of them")
    add("--save", metavar="FILE",
        help="write the results there, as JSON, anew after each case")  # fmt: skip


def add_case_options(add) -> None:
    """A case of one's own."""
    add("--shape", type=int, nargs=4, metavar=("BATCH", "LENGTH", "HEADS", "HEAD_DIM"),
        help="measure this shape, full and causal, instead of tables")  # fmt: skip
    add("--kv-heads", type=int, default=0)
    add("--kv-length", type=int, default=0)
    add("--value-dim", type=int, default=0)
    add("--dtype", choices=("bfloat16", "float16", "float32"))
    add("--mask", choices=("full", "causal"), help="of --shape; default: both")


def own_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases of --shape."""
    batch, length, heads, head_dim = arguments.shape
    masks = {None: (False, True), "full": (False,), "causal": (True,)}[arguments.mask]
    dtype = arguments.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    return [
        Case("shape", batch, length, heads, head_dim, kv_len=arguments.kv_length,
             kv_heads=arguments.kv_heads, value_dim=arguments.value_dim, dtype=dtype,
             is_causal=causal)
        for causal in masks
    ]  # fmt: skip


def parse_speed(argv: list[str]) -> argparse.Namespace:
    tables = ", ".join([*TABLES, *LAYERS])
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py",
        description="Times jax_flash beside other attentions, call by call in turn, and compares "
        "each with a float64 oracle. Other commands: "
        + "; ".join(f"{name}: {text}" for name, text in list(COMMANDS.items())[1:]) + ".",
    )  # fmt: skip
    add = parser.add_argument
    add("--cases", nargs="+", metavar="TABLE", choices=[*TABLES, *LAYERS],
        help=f"of {tables}; default: targets and decode, without a GPU cpu")  # fmt: skip
    add("--only", nargs="+", metavar="TEXT", help="cases whose name contains one of these")
    add_case_options(add)
    add("--contenders", nargs="+", metavar="NAME", help="default: all; --list names them")
    add("--passes", nargs="+", choices=PASSES, help="default: all that a case has")
    add("--cold", action="store_true",
        help="rotate inputs, so that none is left in the cache from the call before")  # fmt: skip
    add("--sustained", type=float, default=0.0, metavar="S",
        help="also keep the device busy for S seconds with each, and time those calls")  # fmt: skip
    add("--setup-limit", type=float, metavar="S",
        help="leave out of the cases that follow who took longer to compile one, the first one "
        "excepted, which imports")  # fmt: skip
    add("--stop-after", type=float, metavar="S",
        help="begin no further case S seconds after the start")  # fmt: skip
    add_timing_options(add)
    add("--against", metavar="OLD.json",
        help="compare with these results; exits with 1 if something became slower")  # fmt: skip
    add("--tolerance", type=float, default=0.02, help="of --against (default: %(default)s)")
    add("--plot", metavar="FOLDER", help="also draw the results there, as PNGs")
    add("--list", action="store_true", help="list cases and contenders, and exit")
    arguments = parser.parse_args(argv)
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'jax-flash[benchmark]'")
    if arguments.calls < 1 or arguments.warmup < 0:
        parser.error("--calls must be at least 1, --warmup at least 0")
    of_shape = ("kv_heads", "kv_length", "value_dim", "dtype", "mask")
    if arguments.shape is None:
        for name in of_shape:
            if getattr(arguments, name):
                parser.error(f"--{name.replace('_', '-')} is for --shape, which is not given")
    elif min(*arguments.shape, arguments.kv_heads + 1, arguments.kv_length + 1) < 1:
        parser.error("--shape, --kv-heads and --kv-length must be above 0")
    elif arguments.shape[2] % (arguments.kv_heads or 1):
        parser.error("--kv-heads must divide the number of heads of --shape")
    unknown = sorted(set(arguments.contenders or ()) - all_contenders().keys())
    if unknown:
        parser.error(f"--contenders: no {unknown[0]!r}; --list names them")
    return arguments


def speed_command(argv: list[str]) -> int:
    begun = time.perf_counter()
    arguments = parse_speed(argv)
    on_gpu = jax.default_backend() == "gpu"
    names = arguments.cases or (["targets", "decode"] if on_gpu else ["cpu"])
    cases = own_cases(arguments) if arguments.shape else select([n for n in names if n in TABLES])
    cases = [case for case in cases if any(text in case.name for text in arguments.only or [""])]
    if arguments.only and not cases:
        raise SystemExit(f"benchmark: --only: no case of {', '.join(names)} has such a name")
    layers = [] if arguments.shape else [LAYERS[name] for name in names if name in LAYERS]
    contenders = all_contenders()
    if arguments.list:
        print("\n".join(f"{case.group}: {case.name}" for case in cases))
        print("contenders:", ", ".join(contenders))
        return 0
    chosen = [contenders[name] for name in arguments.contenders or contenders]
    try:
        old = report.load(arguments.against) if arguments.against else None
    except (OSError, ValueError) as error:
        raise SystemExit(f"benchmark: --against: {error}") from None
    document, timer, sentence = start(arguments)
    peaks = document["peaks"]
    for dtype in dict.fromkeys(case.dtype for case in cases):
        peaks[dtype] = peak.measure_peak(timer, dtype, sustained=arguments.sustained)
        print(f"{dtype}: {peak.describe(peaks[dtype])}")
    settings = speed.Settings(
        timer, arguments.warmup, arguments.calls, arguments.seconds, arguments.cold,
        arguments.sustained, tuple(arguments.passes) if arguments.passes else None,
        arguments.setup_limit,
    )  # fmt: skip
    document["timing"] |= {"sustained_s": arguments.sustained, "cold": arguments.cold}
    document["cases"] = [{"name": case.name, **dataclasses.asdict(case)} for case in cases]
    results = document["results"] = []

    def include(rows: list[dict], dtype: str, peaks: dict) -> None:
        results.extend(rows)
        print(f"\n{rows[0]['group']}: {rows[0]['case']}")
        print(report.format_case(rows, peaks, dtype), flush=True)
        if arguments.save:  # what is there if the run is cut off
            report.save({**document, "interrupted": True}, arguments.save)

    def late() -> bool:
        if arguments.stop_after is None or time.perf_counter() - begun <= arguments.stop_after:
            return False
        document["interrupted"] = True
        return True

    try:
        dtypes = {case.name: case.dtype for case in cases}
        for rows in speed.measure_cases(cases, chosen, settings, late):
            include(rows, dtypes[rows[0]["case"]], peaks)
        for layer in layers:
            if not late():
                include(measure_layer(layer, chosen, settings), layer.dtype, {})
    except KeyboardInterrupt:
        document["interrupted"] = True
        speed.say("\ninterrupted; this is what was measured")
    if on_gpu:
        document["clocks_after"] = environment.clocks()
    print(f"\n{sentence}\n{report.FOOTNOTE}")
    return finish(arguments, document, old)


def start(arguments: argparse.Namespace) -> tuple[dict, timing.Timer, str]:
    """What every document begins with, the timer, and the sentence about it."""
    if ffi.native is None:  # the reference would be measured under the kernels' name
        raise SystemExit(f"benchmark: {ffi.load_error} (jax_flash is imported from {ffi.__file__})")
    try:
        timer, sentence = timing.choose_timer(arguments.timer)
    except ValueError as error:
        raise SystemExit(f"benchmark: {error}") from None
    document = {
        "format": report.FORMAT,
        **environment.environment(arguments.commit),
        "timing": {"source": timer.source, "sentence": sentence, "warmup": arguments.warmup,
                   "calls": arguments.calls},
        "peaks": {},
    }  # fmt: skip
    where = document["device"]
    driver = f", driver {where['driver']}" if where["driver"] else ""
    print(f"{where['kind']}{driver}, jax {jax.__version__}; times: {sentence}")
    return document, timer, sentence


def finish(arguments: argparse.Namespace, document: dict, old: dict | None) -> int:
    """Saves, draws and compares, as asked; returns the exit status."""
    if arguments.save:
        report.save(document, arguments.save)
        print(f"wrote {arguments.save}")
    if getattr(arguments, "plot", None):
        from flash_benchmark import plots

        for path in plots.draw_all(document, arguments.plot):
            print(f"wrote {path}")
    if document.get("interrupted"):
        return 130
    if old is None:
        return 0
    found = report.changes(document, old, arguments.tolerance)
    if not found:
        print(f"\n{arguments.against}: no call of jax_flash is in both, timed in the same way")
        return 1
    print(f"\nagainst {arguments.against}:\n" + report.format_changes(found, document, old))
    return 1 if any(entry["regression"] for entry in found) else 0
