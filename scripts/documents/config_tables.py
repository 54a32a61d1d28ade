"""docs/configs.md: every field of every main's configuration, from the dataclasses themselves."""

from moejax.config.benchmark import BenchmarkConfig
from moejax.config.commands import (
    EvaluateConfig,
    GenerateConfig,
    MemoryConfig,
    PlanConfig,
    QuantizeConfig,
)
from moejax.config.options import Option, RunConfig, options
from moejax.config.policy import SETTINGS, PolicyConfig
from moejax.config.profile import ProfileConfig
from moejax.config.serve import ServeConfig
from moejax.config.sweep import SweepConfig
from moejax.policies.make import POLICIES, settings_of

# In the order in which a reader meets them. `moejax.plan` takes what generate takes, and more.
MAINS: dict[str, RunConfig] = {
    "generate": GenerateConfig(),
    "quantize": QuantizeConfig(),
    "evaluate": EvaluateConfig(),
    "benchmark": BenchmarkConfig(),
    "plan": PlanConfig(),
    "profile_experts": ProfileConfig(),
    "sweep": SweepConfig(),
    "serve": ServeConfig(),
}
GROUPS: dict[str, RunConfig] = {"memory": MemoryConfig(), "policy": PolicyConfig()}
_HEAD = ["| field | default | what it is |", "| --- | --- | --- |"]


def tables() -> str:
    """A section for each main, then one for each group that they share."""
    lines: list[str] = []
    for name, config in MAINS.items():
        lines += ["", f"## moejax.{name}", "", *_of_main(name, config)]
    lines += ["", "## memory.*", "", *_rows(options(GROUPS["memory"]), "memory.")]
    lines += ["", "## policy.*", "", *_rows(options(GROUPS["policy"]), "policy.")]
    lines += [
        "",
        "What `policy.settings` may hold: the settings of the policies themselves; one that is not",
        "given has its policy's own default. [policies.md](policies.md) says what they mean.",
        "",
        "| setting | of which policy, what | default |",
        "| --- | --- | --- |",
        *_settings(),
    ]
    return "\n".join(lines).strip()


def _of_main(name: str, config: RunConfig) -> list[str]:
    fields = options(config)
    groups = [group for group in GROUPS if any(of.name.startswith(f"{group}.") for of in fields)]
    own = [of for of in fields if not of.name.startswith(tuple(f"{group}." for group in groups))]
    lines = []
    if name == "plan":
        others = {of.name for of in options(MAINS["generate"])}
        own = [of for of in own if of.name not in others]
        lines += ["All fields of `moejax.generate`, and:", ""]
    lines += _rows(own)
    if groups and name != "plan":
        said = " and ".join(f"`{group}.*`" for group in groups)
        lines += ["", f"And {said}, below."]
    return lines


def _rows(fields: list[Option], prefix: str = "") -> list[str]:
    rows = [(f"`{prefix}{of.name}`", _value(of.default), _cell(of.meaning)) for of in fields]
    return [*_HEAD, *(f"| {' | '.join(row)} |" for row in rows)]


def _settings() -> list[str]:
    rows = []
    for setting, meaning in SETTINGS.items():
        defaults: dict[str, list[str]] = {}
        for name in POLICIES:
            known = settings_of(name)
            if setting in known and (name != "compose" or setting == "parts"):
                defaults.setdefault(_value(known[setting]), []).append(name)
        if setting == "lists":
            defaults = {"the checkpoint's": ["buddymoe"]}
        several = len(defaults) > 1
        said = ", ".join(
            f"{value} ({', '.join(names)})" if several else value
            for value, names in defaults.items()
        )
        rows.append(f"| `{setting}` | {_cell(meaning)} | {said} |")
    return rows


def _value(default: object) -> str:
    """As it is typed; of a function that makes one, nothing."""
    return f"`{default!r}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
