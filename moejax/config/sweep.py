"""Configuration of `python -m moejax.sweep`."""

import dataclasses
from pathlib import Path

from moejax.config.commands import PLATFORM
from moejax.config.options import RunConfig, option
from moejax.config.policy import NAMES
from moejax.errors import MoejaxError

# By the name's end, what such a file begins with; an SVG may begin in several ways.
PICTURES = {".png": b"\x89PNG", ".pdf": b"%PDF-", ".svg": b"<", ".jpg": b"\xff\xd8\xff"}
LRU = "lru"  # `on_demand` in one tier, which is the engine's cache without a policy
POLICIES = (LRU, *NAMES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig(RunConfig):
    """A trace, a grid of settings, and the machine to model."""

    command = "moejax.sweep"

    trace: str = option(
        "", "a trace (--config.record_trace of generate or evaluate); must be given"
    )
    policy: str = option(
        LRU,
        "lru (the engine's cache, to the last hit), or a policy: on_demand, dynaexq, dymoe, "
        "buddymoe (with an axis lists=FILE, a profile of moejax.profile_experts), compose, or "
        "MODULE:CLASS of your own",
    )
    grid: tuple[str, ...] = option(
        (),
        "axes NAME=VALUES: slots=8:80:8, retention=0.5,0.75, of two tiers slots=24/104, of the "
        "host's cores host=0/0/1/2 (of 0, 1, ... misses); (): slots of 1/8, 2/8, ... of the "
        "trace's experts, in every tier",
    )
    tiers: tuple[str, ...] = option(
        (), "tiers of falling fidelity, each NAME=BYTES of an expert; (): the trace's"
    )
    planes: bool = option(
        False,
        "the two tiers are bit planes of one copy; where slots of the second are fewer than the "
        "experts, planes of both share the sum of the slots",
    )
    recommend: bool = option(
        False, "no grid: the fastest policy in device_gib that keeps the floor, and how to run it"
    )
    mesh: str = option(
        "", "number of devices that have an equal share of every expert each, and a link; '': one"
    )
    device_gib: float = option(
        0.0, "recommend: accelerator memory for experts, GiB; 0: not given", least=0, most=1e6,
        of=("recommend",),
    )  # fmt: skip
    floor: float = option(
        0.95, "recommend: least share of the gate mass served like the first tier", least=0, most=1,
        of=("recommend",),
    )  # fmt: skip
    bulk: int = option(
        -1, "most experts in flight between calls of 16 steps, like memory.bulk; -1: the engine's",
        least=-1, most=2**31 - 1,
    )  # fmt: skip
    base_ms: float = option(
        0.0, "milliseconds of a decode step without misses; 0: transfers alone", least=0
    )
    links: tuple[str, ...] = option(
        ("50", "12"), "GiB/s from host to device: PCIe 5 x16 about 50, PCIe 3 x16 about 12"
    )
    fetch_ms: float = option(0.0, "milliseconds of overhead per fetching launch; 0: none", least=0)
    overlap: float = option(
        0.0,
        "share of a layer's time that can hide prefetch; 0: the engine's, 1: ideal",
        least=0,
        most=1,
    )
    calibration: str = option(
        "", "rows (.jsonl) of moejax.benchmark in several budgets, to fit base_ms and a first link"
    )
    output: str = option("", "a JSON Lines file to which every setting is appended; '': none")
    plot: str = option("", "a picture of time against memory (.png); '': none")
    rows: int = option(
        40, "most settings in the printed table, spread over the Pareto front", least=1
    )
    platform: str = PLATFORM

    def check(self) -> None:
        """Checks fields; trace, grid and machine are checked when read (`RunConfig.check`)."""
        super().check()
        if self.policy not in POLICIES and ":" not in self.policy:
            known = ", ".join(POLICIES)
            raise MoejaxError(f"there is no policy {self.policy!r} to sweep over; known: {known}")
        if not self.links and not self.calibration:
            raise MoejaxError("links=() must name a speed in GiB/s, or give a calibration")
        for link in self.links:
            _number("links", link)
        if self.recommend and self.planes:
            raise MoejaxError("recommend compares whole copies: leave planes out")
        if self.recommend and not self.device_gib:
            raise MoejaxError("recommend needs --config.device_gib=GIB")
        for tier in self.tiers:
            name, _, size = tier.partition("=")
            if not name or not size.isdecimal() or not int(size):
                raise MoejaxError(f"tiers: {tier!r} is not NAME=BYTES, such as int4=2654208")
        names = [tier.partition("=")[0] for tier in self.tiers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise MoejaxError(f"tiers: {twice[0]!r} stands twice")
        for name in ("policy", "grid", "output", "plot"):
            if self.recommend and getattr(self, name) not in (LRU, (), ""):
                raise MoejaxError(f"{name} is of a grid, which recommend has not: leave it out")
        if self.plot and not self.plot.lower().endswith(tuple(PICTURES)):
            raise MoejaxError(f"plot={self.plot!r} must end in {', '.join(PICTURES)}")

    def speeds(self) -> list[float]:
        """Speeds of the links, GiB/s."""
        return [_number("links", link) for link in self.links]


def check_picture(path: Path) -> None:
    """Raises MoejaxError if the file exists and is not a picture of its named kind."""
    if not path.is_file():
        return
    kind = path.suffix.lower()
    with path.open("rb") as file:
        head = file.read(1024)
    is_svg = kind != ".svg" or b"<svg" in head
    if head and not (head.startswith(PICTURES[kind]) and is_svg):
        raise MoejaxError(f"plot {path} is there and is no picture ({kind}); name another file")


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise MoejaxError(f"{name}: {text!r} must be a speed in GiB/s")
    return value
