"""Rows of the table that says what each call's time is made of, for result_pages.py."""

# Of the profile's units, in the order of the table.
UNITS = ("tensor", "MUFU", "issue", "shared memory", "L2", "DRAM")
HEADER = ["(B,T,N,H)", "us", "floor, us", "of it", *UNITS, "rest of the time", "warps wait for"]


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.{1 if seconds < 1e-4 else 0}f}"


def row(call: dict) -> list[str]:
    """A call's cells: its highest floor, how busy its longest kernel's units are, and the rest."""
    shape, _, mask = call["case"].split(" ", 2)
    name, floor = max(call["floors"].items(), key=lambda item: item[1])
    units = {unit: call[unit] for unit in UNITS}
    busiest = max(units.values())
    shares = sorted(call["shares"].items(), key=lambda item: -item[1])
    waits = sorted(call["stalls"], key=lambda reason: -call["stalls"][reason])
    return [
        f"{shape} {mask}, {call['pass']}",
        microseconds(call["time"]),
        f"{microseconds(floor)} {name}",
        f"{floor / call['time']:.0%}",
        *(f"**{x:.0f}%**" if x == busiest else f"{x:.0f}%" for x in units.values()),
        ", ".join(f"{n} {s:.0%}" for n, s in shares if n != "tensor floor" and s >= 0.02),
        ", ".join([reason for reason in waits if "selected" not in reason][:2]),
    ]


def rows(document: dict) -> list[list[str]]:
    return [row(call) for call in document["results"]]
