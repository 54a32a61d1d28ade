"""The gated delta rule and its convolution against plain loops in float64."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import strategies as st

from moejax.models.delta_net import CHUNK_LENGTH, _causal_convolution, _delta_rule, _DeltaTokens
from tests import slow

# Float32 against float64: a token's update passes the errors of those before it on, at most whole.
TOLERANCE = 2e-5
LENGTHS = (1, 2, 16, 63, CHUNK_LENGTH, CHUNK_LENGTH + 1, 3 * CHUNK_LENGTH, 150)


def draw(rng, batch, length, num_keys, repeats, key_dim, value_dim, decay):
    """Tokens, and the state before them; `decay` is the mean of -g."""
    heads = num_keys * repeats

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    shared = unit(normal(batch, 1, num_keys, key_dim))  # keys that are alike make systems hard
    tokens = _DeltaTokens(
        q=unit(normal(batch, length, num_keys, key_dim)),
        k=unit(shared + normal(batch, length, num_keys, key_dim) / key_dim),
        v=normal(batch, length, heads, value_dim),
        log_decay=-rng.exponential(decay, (batch, length, heads)).astype(np.float32),
        beta=rng.uniform(size=(batch, length, heads)).astype(np.float32),
    )
    return tokens, normal(batch, heads, key_dim, value_dim)


def by_loop(tokens, active, state):
    """Eq. 10 of arXiv:2412.06464, token by token; reads of tokens that are not active are zero."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in tokens)
    state, read = np.asarray(state, np.float64), np.zeros(v.shape)
    batch, length, heads = beta.shape
    repeats = heads // k.shape[2]
    for b in range(batch):
        for h in range(heads):
            s = state[b, h].T  # the paper's: [value dim, key dim]
            for t in range(length):
                if not active[b, t]:
                    continue
                key, alpha = k[b, t, h // repeats], np.exp(log_decay[b, t, h])
                forgets = np.eye(len(key)) - beta[b, t, h] * np.outer(key, key)
                s = s @ (alpha * forgets) + beta[b, t, h] * np.outer(v[b, t, h], key)
                read[b, t, h] = s @ q[b, t, h // repeats]
            state[b, h] = s.T
    return read, state


rule = jax.jit(_delta_rule)


def ends(rng, batch, length):
    """How many tokens of each row are active; the first row has all of them."""
    return np.concatenate([[length], rng.integers(0, length + 1, batch - 1)])


class DeltaRuleTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
    @hypothesis.given(st.data())
    def test_is_the_recurrence(self, data):
        length = data.draw(st.sampled_from(LENGTHS))
        sizes = data.draw(st.sampled_from([(1, 1, 4, 4), (2, 2, 8, 4), (1, 3, 5, 8)]))
        decay = data.draw(st.sampled_from([0.0, 0.05, 1.0, 40.0]))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        tokens, state = draw(rng, 3, length, *sizes, decay)
        if data.draw(st.booleans()):  # whatever is off, not only what comes after a row's end
            active = rng.uniform(size=(3, length)) < 0.7
        else:
            active = np.arange(length)[None] < ends(rng, 3, length)[:, None]
        read, after = rule(tokens, active, state)
        expected, expected_state = by_loop(tokens, active, state.copy())
        read = np.where(active[:, :, None, None], read, 0.0)
        np.testing.assert_allclose(read, expected, atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(after, expected_state, atol=TOLERANCE, rtol=TOLERANCE)

    @slow.repeats()
    @parameterized.parameters(1, 40, 100)
    def test_tokens_that_are_not_active_leave_the_state_bit_for_bit(self, length):
        tokens, state = draw(np.random.default_rng(0), 2, length, 2, 2, 8, 8, 0.1)
        _, after = rule(tokens, np.zeros((2, length), bool), state)
        np.testing.assert_array_equal(after, state)

    def test_memory_is_linear_in_length(self):
        temporaries = []
        for length in (1024, 4096):
            tokens, state = draw(np.random.default_rng(0), 1, length, 1, 2, 8, 8, 0.1)
            compiled = rule.lower(tokens, np.ones((1, length), bool), state).compile()
            temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        self.assertLess(temporaries[1], 4.5 * temporaries[0])


class ConvolutionTest(parameterized.TestCase):
    def test_a_tail_of_half_precision_stays_so(self):
        x = jnp.ones((2, 1, 4), jnp.bfloat16)
        convolve = functools.partial(_causal_convolution, x, jnp.zeros((2, 3, 4), jnp.bfloat16))
        found, tail = convolve(jnp.ones((4, 1, 4), jnp.bfloat16), jnp.array([[True], [False]]))
        self.assertEqual((found.dtype, tail.dtype), (jnp.float32, jnp.bfloat16))
        np.testing.assert_array_equal(jnp.sum(tail, axis=(1, 2), dtype=jnp.float32), [4, 0])
