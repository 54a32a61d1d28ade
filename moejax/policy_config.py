"""The group `policy` of run configurations: which policy, its settings, and the tiers."""

import dataclasses
from typing import TYPE_CHECKING, Any

from moejax.errors import MoejaxError
from moejax.options import RunConfig, option

if TYPE_CHECKING:  # it imports JAX, which --help and mistakes need not wait for
    from moejax.tiering import Tiering

NAMES = ("resident", "on_demand", "dynaexq", "dymoe", "buddymoe", "compose")
# Fields that are not settings of a policy.
OWN = ("name", "tiers", "slots", "quantizer", "group_size", "emulate")


def _setting(meaning: str) -> str:
    """Of a policy; '' is the policy's own default, the only place where that is written."""
    return option("", meaning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(RunConfig):
    """What decides which experts run, in which precision; `moejax.policies` says more of each."""

    name: str = option(
        "",
        f"{', '.join(NAMES)}; '': the router alone, one form of the experts",
    )
    tiers: tuple[str, ...] = option(
        (),
        "forms of the experts by falling fidelity, NAME=CHECKPOINT of the same model each; int8, "
        "int4, int3, int2 alone are made of the checkpoint's plain experts at load, any other name "
        "is the checkpoint as it is; (): only that",
    )
    slots: tuple[str, ...] = option(
        (), "experts of a layer that the accelerator caches in each tier; (): as memory allows"
    )
    quantizer: str = option("hqq", "of tiers that are made at load: rtn, hqq or least_squares")
    group_size: int = option(64, "inputs that share a scale in them")
    emulate: bool = option(
        False, "keep all experts of all tiers and let slots be tables: quality without the traffic"
    )

    parts: str = _setting("compose: two or three of dynaexq+dymoe+buddymoe")
    tier: str = _setting("resident, on_demand: the tier that runs")
    prefetch: str = _setting("on_demand, dymoe: experts of the next layer brought ahead")
    hot: str = _setting("dynaexq: the tier of high precision")
    cold: str = _setting("dynaexq: that of low precision")
    period: str = _setting("dynaexq: tokens between updates, T")
    alpha: str = _setting("dynaexq: of the mean of gates (eq. 2)")
    tau: str = _setting("dynaexq: fixed or moving")
    n_hot: str = _setting("dynaexq: experts of a layer in high precision")
    warmup: str = _setting("dynaexq: tokens before the first choice")
    hysteresis: str = _setting("dynaexq: share by which a cold expert must exceed a hot one")
    foresight: str = _setting("dynaexq: experts of a layer read ahead from the disk, as likely hot")
    foresee_by: str = _setting("dynaexq: what tells them, scores or links (the layer before)")
    links: str = _setting("dynaexq: a profile for foresee_by=links; '': the checkpoint's")
    choice: str = _setting("dynaexq: hot; to compare with, random or first")
    high: str = _setting("dymoe: the tier of critical experts")
    low: str = _setting("dymoe: that of the others; skip leaves them out")
    retention: str = _setting("dymoe: r, mean share of critical experts")
    schedule: str = _setting("dymoe: over depth: cosine, linear, sensitivity or equal")
    sensitivity: str = _setting("dymoe: of each layer, for that schedule")
    rounding: str = _setting("dymoe: diffused or ceil")
    selection: str = _setting("dymoe: critical, load or random")
    aggregation: str = _setting(
        "dymoe: of the attention that a prompt's token receives: mean, sum or last_query"
    )
    heavy_share: str = _setting("dymoe: of a prompt's tokens that are heavy hitters")
    heavy_count: str = _setting("dymoe: their number in place of the share")
    renormalise: str = _setting("dymoe: weights of what is left sum to what all summed to")
    reuse_skipped: str = _setting("dymoe: experts to be left out run where their copy is there")
    lists: str = _setting("buddymoe: a profile of moejax.profile_experts; '': the checkpoint's")
    choose: str = _setting("buddymoe: buddies; to compare with, none, random or matched_random")
    gains: str = _setting("buddymoe: profile scales a buddy's weight by how alike outputs are")
    tae_tau: str = _setting(
        "buddymoe: of eq. 1; profile takes the profile's percentile and temperature"
    )
    tae_margin: str = _setting("buddymoe: gamma; 2 is off")
    tae_temperature: str = _setting("buddymoe: of eq. 1")
    beta: str = _setting("buddymoe: of eq. 2")
    bypass_bytes: str = _setting(
        "buddymoe: in place of beta, bytes that bypassed layers may fetch in a decode step"
    )
    eta: str = _setting("buddymoe: weight of the token's own logits in eq. 3")
    kappa: str = _setting("buddymoe: penalty of a hop in eq. 3")
    hops: str = _setting("buddymoe: partitions between each expert and the tokens")
    discount: str = _setting("buddymoe: of a buddy's second use by a token; 0: never twice")
    rho: str = _setting("buddymoe: replacements of a token and layer at most")
    spend_on: str = _setting("buddymoe: which pairs rho goes to, first or last")
    depth: str = _setting("buddymoe: places of a list that are searched, H")
    fall_back: str = _setting("buddymoe: of a pair without a buddy, fetch or drop")
    in_prefill: str = _setting("buddymoe: whether prompts are served by buddies too")
    background_bytes: str = _setting("buddymoe: of background transfers, a step")
    half_life: str = _setting("buddymoe: steps after which a miss counts half")
    least_misses: str = _setting("buddymoe: from which on an expert is brought")
    form: str = _setting("buddymoe: how Algorithm 1 is computed: table, ranks or kernel")
    max_requests: str = _setting("dynaexq, buddymoe: transfers asked for after a step at most")
    seed: str = _setting("of random choices")

    def settings(self) -> dict[str, str]:
        """Those that are given, as texts."""
        fields = (field.name for field in dataclasses.fields(self))
        found = {name: getattr(self, name) for name in fields if name not in OWN}
        return {name: value for name, value in found.items() if value}

    def tiering(self) -> "Tiering | None":
        """The policy and its tiers as an engine takes them; None for the router alone.

        Raises:
          MoejaxError: there is no such policy or setting, or a value is not allowed.
        """
        if not self.name:
            return None
        from moejax.policies.make import check_settings
        from moejax.tiering import Tiering, parsed

        given: dict[str, Any] = {name: parsed(text) for name, text in self.settings().items()}
        check_settings(self.name, given)
        return Tiering(
            policy=self.name,
            settings=given,
            tiers=self.tiers,
            slots=tuple(int(count) for count in self.slots),
            quantizer=self.quantizer,
            group_size=self.group_size,
            emulate=self.emulate,
        )

    def check(self) -> None:
        """See `RunConfig.check`; settings are checked where the policy is made."""
        if self.name == "auto":
            raise MoejaxError(
                "name='auto' is no longer a policy: moejax.sweep --config.trace=FILE "
                "--config.recommend=True names the fastest one for a trace of your own"
            )
        if self.name and self.name not in NAMES:
            raise MoejaxError(f"name={self.name!r} must be one of {', '.join(NAMES)}")
        if not self.name:
            default = PolicyConfig()
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != getattr(default, field.name):
                    said = f"{field.name}={getattr(self, field.name)!r}"
                    raise MoejaxError(f"{said} is of a policy, but none is named: give policy.name")
        for count in self.slots:
            if not count.isdigit():
                raise MoejaxError(f"slots: {count!r} is not a number of experts")
