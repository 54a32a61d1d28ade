"""docs/configs.md: every field of every command, read from the dataclasses."""

from typing import Any

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
from scripts.studies.tables.paper import markdown_table

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
_Field = tuple[str, Any, str]


def tables() -> str:
    """Fields that commands share, those of each command, and the groups that they share."""
    shared = _shared()
    lines = [
        "## Fields that several commands share",
        "",
        "`moejax.plan` takes every field of `moejax.generate`; here it is named for its own alone.",
        "",
    ]
    rows = [
        [f"`{name}`", ", ".join(mains), _value(default), _cell(meaning)]
        for (name, default, meaning), mains in shared.items()
    ]
    lines.append(markdown_table(["field", "commands", "default", "what it is"], rows))
    for name, config in MAINS.items():
        lines += ["", f"## moejax.{name}", "", *_of_main(name, config, shared)]
    for group, config in GROUPS.items():
        lines += ["", f"## {group}.*", "", _rows(options(config), f"{group}.")]
    lines += [
        "",
        "`policy.settings` holds the settings of the policies themselves. A setting that is not",
        "given has its policy's default. [policies.md](policies.md) explains them.",
        "",
        _settings(),
    ]
    return "\n".join(lines).strip()


def _shared() -> dict[_Field, list[str]]:
    """Fields that are alike in several commands, with those commands."""
    found: dict[_Field, list[str]] = {}
    generated = {of.name for of in options(MAINS["generate"])}
    for name, config in MAINS.items():
        for of in options(config):
            if not _is_grouped(of) and not (name == "plan" and of.name in generated):
                found.setdefault(_key(of), []).append(name)
    return {field: mains for field, mains in found.items() if len(mains) > 1}


def _of_main(name: str, config: RunConfig, shared: dict[_Field, list[str]]) -> list[str]:
    fields = options(config)
    own = [of for of in fields if not _is_grouped(of) and name not in shared.get(_key(of), [])]
    lines = []
    if name == "plan":
        others = {of.name for of in options(MAINS["generate"])}
        own = [of for of in own if of.name not in others]
        lines += ["Every field of `moejax.generate`, shared fields above, and:", ""]
    lines.append(_rows(own))
    groups = [group for group in GROUPS if any(of.name.startswith(f"{group}.") for of in fields)]
    if groups and name != "plan":
        said = " and ".join(f"`{group}.*`" for group in groups)
        lines += ["", f"And the shared fields above, {said} below."]
    return lines


def _is_grouped(of: Option) -> bool:
    return of.name.startswith(tuple(f"{group}." for group in GROUPS))


def _key(of: Option) -> _Field:
    return of.name, of.default, of.meaning


def _rows(fields: list[Option], prefix: str = "") -> str:
    rows = [(f"`{prefix}{of.name}`", _value(of.default), _cell(of.meaning)) for of in fields]
    return markdown_table(["field", "default", "what it is"], rows)


def _settings() -> str:
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
        rows.append([f"`{setting}`", _cell(meaning), said])
    return markdown_table(["setting", "policies and meaning", "default"], rows)


def _value(default: object) -> str:
    """A default as it is typed."""
    return f"`{default!r}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")
