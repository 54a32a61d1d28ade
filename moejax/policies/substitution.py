"""Which expert stands in for a missing one: BuddyMoE's score (eq. 3) and its Algorithm 1.

Tokens are independent; the ranks of a token are visited one after the other, so that the result is
that of the printed loops, not of the CUDA kernel's race (section 4). U_t holds all experts that the
router chose, the missing ones too, as printed, and the buddies so far.

Axes: N tokens, A experts a token, E experts of a layer, H places of a buddy list that are searched.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import buddy_search
from pallas_kernels.buddy_search import Gate

# "table": all pairs of candidates are compared beforehand, and what is left of the loop over ranks
# is arithmetic on bits: on a GPU a whole decision is 7 launches, of "ranks" 8 and a loop of A
# rounds (16 layers, A = 8, H = 16, compiled for an H100 by XLA of jax 0.11.2, 2026-11-21).
# "ranks": the loop, and on a CPU a twelfth of the work: a decision of a sweep over 100 settings
# took 0.6 us against 6.9 (48 layers, 128 experts, two cores, jax 0.10.2, 2026-11-21), so that
# sweeps on a CPU search by it.
# Lists of more places than a word has bits are searched by it whatever is asked for.
# "kernel": one launch (`pallas_kernels.buddy_search`) where lists are in their order; else "table".
Form = Literal["table", "ranks", "kernel"]
MAX_TABLE_DEPTH = 32  # bits of a word
_WORD = jnp.uint32


class Candidates(NamedTuple):
    """Who may stand in for each pair, before the buddies of the token's other pairs are known.

    Attributes:
      ids: int32[N, A, H], -1 where nobody may.
      priority: float32[N, A, H], the larger first, equal ones by place; None: by place.
    """

    ids: jax.Array
    priority: jax.Array | None = None


class Substitution(NamedTuple):
    """What came of the search, for every pair.

    Attributes:
      ids: int32[N, A], the buddy's where `replaced`, else the router's.
      replaced: bool[N, A].
      searched: bool[N, A], wanted, and the token's budget was not spent yet; where it is not
        `replaced`, there is no buddy.
    """

    ids: jax.Array
    replaced: jax.Array
    searched: jax.Array


def candidates_of(
    ids: jax.Array, lists: jax.Array, resident: jax.Array, depth: jax.Array
) -> jax.Array:
    """The listed buddies of each pair that are resident and not chosen by the router (lines 15-17).

    Args:
      ids: int32[N, A], the router's choice.
      lists: int32[E, H], buddies of each expert, the best first; -1 pads.
      resident: bool[E].
      depth: int32[], how far lists are searched, at most H.

    Returns:
      int32[N, A, H], -1 for none.
    """
    listed = lists.at[ids].get(mode="clip")
    usable = (listed >= 0) & resident.at[listed].get(mode="clip")
    usable &= jnp.arange(lists.shape[1], dtype=jnp.int32)[None, None] < depth
    for rank in range(ids.shape[1]):
        usable &= listed != ids[:, rank, None, None]
    return jnp.where(usable, listed, -1)


def normalized_logits(probabilities: jax.Array) -> jax.Array:
    """z^ of eq. 3: the router's logits, of which softmax keeps differences, scaled to 0..1.

    The paper names no norm; this one leaves 1 + eta z^ positive.

    Args:
      probabilities: float32[N, E].

    Returns:
      float32[N, E]; 0 where all are equal.
    """
    logits = jnp.log(jnp.maximum(probabilities, float(np.finfo(np.float32).tiny)))
    least = jnp.min(logits, axis=-1, keepdims=True)
    span = jnp.max(logits, axis=-1, keepdims=True) - least
    return (logits - least) / jnp.where(span > 0, span, 1.0)


def priority(
    candidates: jax.Array,
    q: jax.Array,
    logits: jax.Array,
    hops: jax.Array,
    eta: jax.Array,
    kappa: jax.Array,
) -> jax.Array:
    """Eq. 3: Psi(j | i, x) = q_(j|i) (1 + eta z^_j(x)) (1 - kappa hop(j)).

    Args:
      candidates: int32[N, A, H], of `candidates_of`.
      q: float32[N, A, H], of each candidate.
      logits: float32[N, E], of `normalized_logits`.
      hops: float32[E], partitions between the tokens' device and each expert's.
      eta: float32[].
      kappa: float32[].

    Returns:
      float32[N, A, H]; 0 where there is no candidate.
    """
    safe = jnp.maximum(candidates, 0)
    flat = safe.reshape(len(safe), -1)
    local = jnp.take_along_axis(logits, flat, axis=1, mode="clip").reshape(safe.shape)
    psi = q * (1 + eta * local) * (1 - kappa * hops.at[safe].get(mode="clip"))
    return jnp.where(candidates >= 0, psi, 0.0)


def in_order(candidates: Candidates) -> jax.Array:
    """The candidates by falling priority, equal ones by place; priorities <= 0 are left out.

    Returns:
      int32[N, A, H], -1 for none; by comparing all pairs of a list.
    """
    ids, value = candidates
    if value is None:
        return ids
    place = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    earlier, apart = place[None, :] < place[:, None], place[None, :] != place[:, None]
    mine, other = value[..., :, None], value[..., None, :]
    # A compiler may work out both sides anew and round them differently: nobody is before itself.
    before = ((other > mine) & apart[None, None]) | ((other == mine) & earlier[None, None])
    order = jnp.sum(before, axis=-1, dtype=jnp.int32)
    usable = jnp.where(value > 0, ids, -1)
    comes = order[..., None, :] == place[None, None, :, None]
    return jnp.max(jnp.where(comes, usable[..., None, :], -1), axis=-1)


def substitute(
    ids: jax.Array,
    candidates: Candidates,
    wanted: jax.Array,
    budget: jax.Array,
    *,
    last_first: bool = False,
    form: Form = "table",
) -> Substitution:
    """Algorithm 1 with the budget rho (section 5.1): no expert serves a token twice.

    Args:
      ids: int32[N, A], the router's choice, by falling weight.
      candidates: of every pair.
      wanted: bool[N, A], pairs whose expert is missing and may be replaced.
      budget: int32[], rho, replacements of a token at most.
      last_first: ranks are visited from the least weight on, which the budget then goes to.
      form: how it is computed; the result is the same.
    """
    if form not in get_args(Form):
        raise ValueError(f"form {form!r} is none of {', '.join(get_args(Form))}")
    ordered = in_order(candidates)
    if form == "ranks" or ordered.shape[-1] > MAX_TABLE_DEPTH:
        return _by_ranks(ids, ordered, wanted, budget, last_first)
    return _by_table(ids, ordered, wanted, budget, last_first)


def search(
    ids: jax.Array,
    lists: jax.Array,
    layer: jax.Array,
    resident: jax.Array,
    allowed: jax.Array,
    depth: jax.Array,
    budget: jax.Array,
    gate: Gate,
    replaced: jax.Array,
    *,
    last_first: bool = False,
) -> tuple[Substitution, jax.Array]:
    """`substitute` of `candidates_of`, without priorities, in the form "kernel".

    With the gate of tokens and the counts of replaced pairs it is one launch.

    Args:
      ids: int32[N, A], by falling weight.
      lists: int32[M, E, H], of all layers.
      layer: int32[].
      resident: bool[E], of that layer, or int32[M, K], as `Observation.tables`.
      allowed: bool[N] or bool[N, A], tokens or pairs whose missing experts may be replaced if the
        gate lets the token.
      depth: int32[].
      budget: int32[].
      gate: of tokens.
      replaced: int32[M, E], donate it.
      last_first: see `substitute`.

    Returns:
      The substitution, and the counts with its pairs.
    """
    found = buddy_search.search(
        ids, lists, layer, resident, allowed, depth, budget, gate, replaced, last_first=last_first
    )
    assert found.replaced is not None
    return Substitution(found.ids, found.ids != ids, found.searched), found.replaced


def _by_ranks(
    ids: jax.Array, ordered: jax.Array, wanted: jax.Array, budget: jax.Array, last_first: bool
) -> Substitution:
    num_tokens, width, depth = ordered.shape
    place = jnp.arange(depth, dtype=jnp.int32)[None]

    def visit(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        buddies, searched, num_replaced = carry
        rank = width - 1 - step if last_first else step
        mine = jax.lax.dynamic_index_in_dim(ordered, rank, 1, keepdims=False)
        asks = jax.lax.dynamic_index_in_dim(wanted, rank, 1, keepdims=False)
        asks &= num_replaced < budget
        taken = jnp.any(mine[:, :, None] == buddies[:, None, :], axis=-1)
        free = (mine >= 0) & ~taken & asks[:, None]
        first = jnp.min(jnp.where(free, place, depth), axis=-1, keepdims=True)
        buddy = jnp.max(jnp.where(place == first, mine, -1), axis=-1)
        return (
            buddies.at[:, rank].set(buddy),
            searched.at[:, rank].set(asks),
            num_replaced + (buddy >= 0).astype(jnp.int32),
        )

    start = (
        jnp.full((num_tokens, width), -1, jnp.int32),
        jnp.zeros((num_tokens, width), bool),
        jnp.zeros(num_tokens, jnp.int32),
    )
    buddies, searched, _ = jax.lax.fori_loop(0, width, visit, start)
    return Substitution(jnp.where(buddies >= 0, buddies, ids), buddies >= 0, searched)


def _by_table(
    ids: jax.Array, ordered: jax.Array, wanted: jax.Array, budget: jax.Array, last_first: bool
) -> Substitution:
    """The lists as words of bits: bit h stands for the candidate at place h."""
    num_tokens, width, depth = ordered.shape
    bits = (np.uint32(1) << np.arange(depth, dtype=np.uint32)).astype(np.uint32)
    open_places = (ordered >= 0) & wanted[:, :, None]
    usable = jnp.sum(jnp.where(open_places, bits[None, None], 0), axis=-1, dtype=_WORD)
    # clash[n, a, h, b]: where in b's list the candidate at place h of a's list stands.
    equal = ordered[:, :, :, None, None] == ordered[:, None, None]
    clash = jnp.sum(jnp.where(equal, bits[None, None, None, None], 0), axis=-1, dtype=_WORD)
    flat_clash, flat_ids = clash.reshape(-1), ordered.reshape(-1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)

    barred = [jnp.zeros(num_tokens, _WORD)] * width
    num_replaced = jnp.zeros(num_tokens, jnp.int32)
    buddies, searched = [token] * width, [token < 0] * width
    ranks = list(reversed(range(width))) if last_first else list(range(width))
    for i, rank in enumerate(ranks):
        may = num_replaced < budget
        left = jnp.where(may, usable[:, rank] & ~barred[rank], _WORD(0))
        found = left != 0
        lowest = left & (~left + _WORD(1))
        place = jax.lax.population_count(lowest - _WORD(1)).astype(jnp.int32)
        row = (token * width + rank) * depth + jnp.minimum(place, depth - 1)
        for other in ranks[i + 1 :]:
            bars = flat_clash.at[row * width + other].get(mode="promise_in_bounds")
            barred[other] |= jnp.where(found, bars, _WORD(0))
        buddy = flat_ids.at[row].get(mode="promise_in_bounds")
        buddies[rank] = jnp.where(found, buddy, -1)
        searched[rank] = may & wanted[:, rank]
        num_replaced += found.astype(jnp.int32)
    # Or each of its readers would compute it again: 24 s of compiling 16 layers against 9.
    chosen = jax.lax.optimization_barrier(jnp.stack(buddies, axis=1))
    return Substitution(
        jnp.where(chosen >= 0, chosen, ids), chosen >= 0, jnp.stack(searched, axis=1)
    )


def substitute_softly(
    ids: jax.Array,
    candidates: Candidates,
    wanted: jax.Array,
    budget: jax.Array,
    discount: jax.Array,
    *,
    last_first: bool = False,
) -> tuple[Substitution, jax.Array]:
    """As `substitute`, but a buddy of the token may serve it again, at Psi times `discount` a use.

    The router's own choices stay barred. Discount 0 is the hard rule.

    Args:
      ids: int32[N, A], by falling weight.
      candidates: of every pair, with priorities.
      wanted: bool[N, A].
      budget: int32[].
      discount: float32[], in [0, 1].
      last_first: see `substitute`.

    Returns:
      The substitution, in whose `ids` a buddy may come twice; and int32[N, A], the rank that was
      the first to take the same buddy, -1 where it is this one: there the weights meet.
    """
    num_tokens, width, depth = candidates.ids.shape
    assert candidates.priority is not None
    place = jnp.arange(depth, dtype=jnp.int32)[None]
    num_replaced = jnp.zeros(num_tokens, jnp.int32)
    taken: list[jax.Array] = []
    ranks = list(reversed(range(width))) if last_first else list(range(width))
    buddies, searched = [num_replaced] * width, [num_replaced > 0] * width
    first_rank = [num_replaced] * width
    for rank in ranks:
        mine, value = candidates.ids[:, rank], candidates.priority[:, rank]
        for buddy in taken:
            value = jnp.where(mine == buddy[:, None], value * discount, value)
        asks = wanted[:, rank] & (num_replaced < budget)
        free = (mine >= 0) & (value > 0) & asks[:, None]
        best = jnp.max(jnp.where(free, value, 0.0), axis=-1, keepdims=True)
        first = jnp.min(jnp.where(free & (value == best), place, depth), axis=-1, keepdims=True)
        buddy = jnp.max(jnp.where(place == first, mine, -1), axis=-1)
        owner = jnp.full(num_tokens, -1, jnp.int32)
        for earlier, buddy_before in zip(ranks, taken, strict=False):
            owner = jnp.where((owner < 0) & (buddy >= 0) & (buddy_before == buddy), earlier, owner)
        buddies[rank], searched[rank], first_rank[rank] = buddy, asks, owner
        num_replaced += (buddy >= 0).astype(jnp.int32)
        taken.append(buddy)
    chosen = jnp.stack(buddies, axis=1)
    found = Substitution(
        jnp.where(chosen >= 0, chosen, ids), chosen >= 0, jnp.stack(searched, axis=1)
    )
    return found, jnp.stack(first_rank, axis=1)


def substitute_randomly(
    ids: jax.Array, resident: jax.Array, wanted: jax.Array, budget: jax.Array, key: jax.Array
) -> Substitution:
    """The paper's baseline: a resident expert drawn uniformly, none that serves the token already.

    Args:
      ids: int32[N, A].
      resident: bool[E].
      wanted: bool[N, A].
      budget: int32[].
      key: of the draw.
    """
    num_tokens, width = ids.shape
    num_experts = len(resident)
    chosen = jnp.any(
        ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None], axis=1
    )
    free = resident[None] & ~chosen
    draws = jax.random.uniform(key, (num_tokens, num_experts), jnp.float32)
    # A token's n-th replacement takes the n-th of the free experts in a random order.
    drawn, pool = jax.lax.top_k(jnp.where(free, draws, -1.0), min(width, num_experts))
    index = jnp.cumsum(wanted, axis=-1, dtype=jnp.int32) - wanted.astype(jnp.int32)
    num_free = jnp.sum(free, axis=-1, dtype=jnp.int32, keepdims=True)
    searched = wanted & (jnp.minimum(index, num_free) < budget)
    at = jnp.minimum(index, pool.shape[-1] - 1)
    found = searched & (jnp.take_along_axis(drawn, at, axis=-1, mode="clip") >= 0)
    buddies = jnp.take_along_axis(pool, at, axis=-1, mode="clip")
    return Substitution(jnp.where(found, buddies, ids), found, searched)


def merged(
    weights: jax.Array, tier: jax.Array, first_rank: jax.Array, skipped: int
) -> tuple[jax.Array, jax.Array]:
    """A pair whose buddy serves the token at `first_rank` already gives its weight to that one.

    Args:
      weights: float32[N, A].
      tier: int32[N, A].
      first_rank: int32[N, A], -1 where a pair keeps its weight.
      skipped: the tier of a pair that is not computed.
    """
    rank = jnp.arange(weights.shape[1], dtype=jnp.int32)
    to = first_rank[:, :, None] == rank[None, None]
    gained = jnp.sum(jnp.where(to, weights[:, :, None], 0.0), axis=1)
    moved = first_rank >= 0
    return jnp.where(moved, 0.0, weights + gained), jnp.where(moved, skipped, tier)
