"""Programs compiled once per shape and kept, with their compile times."""

import contextlib
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

from moejax.devices import REPLICATED, DeviceMesh
from moejax.errors import MoejaxError

Function = Callable[..., Any]


class CompiledPrograms:
    """Ahead-of-time compiled functions by key.

    A plain `jax.jit` would compile inside a timed call and retrace in silence when a dtype or a
    shape changes; here a mismatch is an error and the time is known.
    """

    def __init__(
        self,
        # gives a function's XLA options
        options_of: Callable[[Function], Mapping[str, str]] = lambda function: {},
        # devices that run each program on their own parts of the arguments; None: one device
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Starts without programs."""
        self._options_of, self._mesh = options_of, mesh
        self._programs: dict[Hashable, jax.stages.Compiled] = {}
        self.seconds = 0.0  # spent in tracing, lowering and compiling so far
        self.num_traces = 0  # programs built so far; constant after warm-up
        self.history: list[tuple[str, float]] = []  # function name and seconds of each, in order
        self.is_compiling = False  # whether a thread is in XLA's compiler, which nothing interrupts
        # makes the context in which a program of a name is compiled
        self.announce: Callable[[str], AbstractContextManager[None]] = lambda name: (
            contextlib.nullcontext()
        )
        self._is_closed = False

    def close(self) -> None:
        """Frees all programs; `get` raises afterwards."""
        self._is_closed = True
        self._programs.clear()

    def check_open(self) -> None:
        """Raises MoejaxError after `close`."""
        if self._is_closed:
            raise MoejaxError("the engine is closed: load it again")

    def get(
        self,
        function: Function,  # pure; its leading arguments are static
        static: tuple[Hashable, ...],  # hashable leading arguments, closed over
        # arrays or trees of them; their shapes and dtypes are part of the key
        arguments: tuple[Any, ...],
        *,
        num_donated: int,  # how many of the first `arguments` are donated
        results: Any = REPLICATED,  # which results are split on a mesh, as in `DeviceMesh.map`
    ) -> jax.stages.Compiled:
        """Compiles `function(*static, *arguments)`, called with `arguments` alone."""
        self.check_open()
        leaves, tree = jax.tree.flatten(arguments)
        # Weights are the same for an engine's whole life; the batch, the chunk and the cache are
        # what varies, and all of them are told apart by these shapes.
        key = (function, static, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        program = self._programs.get(key)
        if program is None:
            start = time.perf_counter()
            self.is_compiling = True
            try:
                with self.announce(function.__name__.replace("_", " ")):
                    lowered = self.lower(
                        function, static, arguments, num_donated=num_donated, results=results
                    )
                    program = lowered.compile()
            finally:
                self.is_compiling = False
            self._programs[key] = program
            spent = time.perf_counter() - start
            self.seconds += spent
            self.num_traces += 1
            self.history.append((function.__name__, spent))
        return program

    def lower(
        self,
        function: Function,
        static: tuple[Hashable, ...],
        arguments: tuple[Any, ...],
        *,
        num_donated: int,
        results: Any = REPLICATED,
    ) -> jax.stages.Lowered:
        """Traces and lowers the program that `get` compiles."""
        place: Callable[..., Any] = self._mesh.map if self._mesh else lambda body, *_: body
        jitted = jax.jit(
            place(lambda *args: function(*static, *args), arguments, results),
            donate_argnums=tuple(range(num_donated)),
            compiler_options=dict(self._options_of(function)) or None,
        )
        return jitted.lower(*arguments)
