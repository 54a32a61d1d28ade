"""Options `policy` of run configurations: the policy, its settings, and the tiers."""

import dataclasses
import re
from typing import TYPE_CHECKING

from moejax.config.grid import described, single
from moejax.config.options import RunConfig, option
from moejax.errors import MoejaxError

if TYPE_CHECKING:  # it imports JAX, which --help and mistakes need not wait for
    from moejax.experts.tiering import Tiering

NAMES = ("resident", "on_demand", "dynaexq", "dymoe", "buddymoe", "compose")
_OWN_CLASS = re.compile(r"[\w.]+:\w+")  # a policy of the user's own
# Meaning of each setting; the policies' classes alone have the defaults.
SETTINGS = {
    "parts": "compose: two or three of dynaexq+dymoe+buddymoe",
    "tier": "resident, on_demand: the tier that runs; '': the first",
    "prefetch": "on_demand, dymoe, buddymoe: experts of the next layer to prefetch; 0: none; "
    "-1: by r (dymoe), as many as a token has (buddymoe)",
    "hot": "dynaexq: the tier of high precision; '': the first",
    "cold": "dynaexq: the tier of low precision; '': the last",
    "period": "dynaexq: tokens between updates, T",
    "alpha": "dynaexq: share of the old mean of gates in the new one (eq. 2); None: 1 - 1/period",
    "tau": "dynaexq: the threshold of hotness: fixed after the warm-up, or moving",
    "n_hot": "dynaexq: experts of a layer in high precision; None: as many as there are slots",
    "warmup": "dynaexq: tokens before the first choice; 0: a period",
    "hysteresis": "dynaexq: share by which a cold expert must exceed a hot one; 0: any",
    "foresight": "dynaexq: experts of a layer read ahead from the disk, as likely hot; 0: none",
    "foresee_by": "dynaexq: how foresight predicts: scores, or links (the layer before)",
    "links": "dynaexq: a profile's file, for foresee_by=links; None: the checkpoint's",
    "choice": "dynaexq: hot; to compare with, random or first",
    "high": "dymoe: the tier of critical experts; '': the first",
    "low": "dymoe: the tier of the others; skip leaves them out; '': the last",
    "retention": "dymoe: mean share of critical experts, r",
    "schedule": "dymoe: that share over depth: cosine, linear, sensitivity or equal",
    "sensitivity": "dymoe: one number per layer, for schedule=sensitivity: 0.1/0.3/...",
    "rounding": "dymoe: rounding of the number of critical experts: diffused or ceil",
    "selection": "dymoe: which experts are critical: critical, load or random",
    "aggregation": "dymoe: aggregation of a prompt token's attention: mean, sum or last_query",
    "heavy_share": "dymoe: share of a prompt's tokens that are heavy hitters",
    "heavy_count": "dymoe: number of heavy hitters, in place of the share; 0: the share",
    "renormalise": "dymoe: rescale the remaining weights to the sum of all",
    "reuse_skipped": "dymoe: experts that would be left out run where a slot holds them",
    "lists": "buddymoe: a file of moejax.profile_experts; not given: the checkpoint's",
    "gains": "buddymoe: profile scales a buddy's weight by how alike outputs are; None: by 1",
    "tae_tau": "buddymoe: threshold of eq. 1, or profile: the profile's; -1: off",
    "tae_margin": "buddymoe: gamma of the same gate; 2: off",
    "tae_temperature": "buddymoe: temperature of the same gate's softmax",
    "beta": "buddymoe: threshold of eq. 2; None: off",
    "bypass_bytes": "buddymoe: in place of beta, bytes that bypassed layers may fetch in a decode "
    "step; None: beta decides",
    "eta": "buddymoe: weight of the token's own logits in eq. 3; 0: none",
    "kappa": "buddymoe: penalty of a hop in eq. 3; 0: none",
    "hops": "buddymoe: partitions between each expert and the tokens: 0/1/...; (): all 0",
    "rho": "buddymoe: most replacements per token and layer; None: no limit",
    "spend_on": "buddymoe: which pairs rho goes to, first or last",
    "depth": "buddymoe: list entries to search, H; None: all",
    "fall_back": "buddymoe: fate of a pair without a buddy: fetch or drop",
    "in_prefill": "buddymoe: use buddies in prompts too",
    "keep_fetched": "buddymoe: no buddy in a prompt for an expert that its chunk fetches anyway",
    "background_bytes": "buddymoe: bytes of background transfers a step; None: 1/4 of an expert",
    "half_life": "buddymoe: steps after which a miss counts half",
    "least_misses": "buddymoe: misses before an expert is fetched in the background",
    "form": "buddymoe: how Algorithm 1 is computed: ranks or kernel",
    "max_requests": "dynaexq, buddymoe: most transfers between two steps",
    "seed": "seed of random choices",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(RunConfig):
    """Options of the policy, which decides experts and precision; see `moejax.policies`."""

    name: str = option(
        "",
        f"{', '.join(NAMES)}, or MODULE:CLASS of your own; '': the router alone, one form of the "
        "experts",
    )
    settings: str = option(
        "",
        "the policy's own, such as retention=0.75,low=skip; --help with policy.name lists them; "
        "'': all have their defaults",
    )
    tiers: tuple[str, ...] = option(
        (),
        "forms of the experts by falling fidelity, NAME=CHECKPOINT of the same model each; int8, "
        "int4, int3, int2 alone are made of the checkpoint's plain or MXFP4 experts at load, any "
        "other name is the checkpoint as it is; (): only that",
    )
    slots: tuple[str, ...] = option(
        (), "experts of a layer that the accelerator caches in each tier; (): as memory allows"
    )
    quantizer: str = option(
        "hqq", "quantizer of tiers that are made at load: rtn, hqq or least_squares"
    )
    group_size: int = option(64, "inputs per scale in tiers that are made at load")
    emulate: bool = option(
        False, "keep all experts of all tiers and let slots be tables: quality without the traffic"
    )

    def moved(self, name: str) -> str:
        """Names the new spelling of a setting that was once a field (`RunConfig.moved`)."""
        return f"--config.policy.settings={name}=VALUE" if name in SETTINGS else ""

    def more_help(self) -> list[str]:
        """Lists the settings of the named policy (`RunConfig.more_help`)."""
        if not self.name:
            return []
        from moejax.policies.make import settings_of

        rows = [
            f"  {described({name: default}):<24} {SETTINGS.get(name, '')}".rstrip()
            for name, default in settings_of(self.name).items()
            if name != "lists"
        ]
        return [f"\nSettings of {self.name} and their defaults, for policy.settings:", *rows]

    def tiering(self) -> "Tiering | None":
        """Builds the policy and its tiers for an engine; None for the router alone."""
        if not self.name:
            return None
        from moejax.experts.tiering import Tiering
        from moejax.policies.make import check_settings

        given = single(self.settings)
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
        """Checks fields; settings are checked when the policy is made (`RunConfig.check`)."""
        super().check()
        if self.name == "auto":
            raise MoejaxError(
                "name='auto' is no longer a policy: moejax.sweep --config.trace=FILE "
                "--config.recommend=True names the fastest one for a trace of your own"
            )
        if self.name and self.name not in NAMES and not _OWN_CLASS.fullmatch(self.name):
            raise MoejaxError(
                f"name={self.name!r} must be one of {', '.join(NAMES)}, or MODULE:CLASS of your own"
            )
        try:
            single(self.settings)
        except MoejaxError as error:
            raise MoejaxError(f"settings: {error}") from error
        if not self.name:
            default = PolicyConfig()
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != getattr(default, field.name):
                    said = f"{field.name}={getattr(self, field.name)!r}"
                    raise MoejaxError(f"{said} is of a policy, but none is named: give policy.name")
        for count in self.slots:
            if not count.isdecimal():
                raise MoejaxError(f"slots: {count!r} is not a number of experts")
