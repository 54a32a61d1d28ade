"""Devices, meshes of them, and the directory of compiled programs."""

import contextlib
import dataclasses
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from moejax.errors import MoejaxError, print_stderr

PLATFORMS = ("auto", "cpu", "gpu")
MESH_AXIS = "shares"  # name of a mesh's one axis in the programs
_ATTENTION = {"heads": True, "whole": False}  # words of a mesh, as `asked_heads` has them
_EXPERTS = re.compile(r"experts(?:\+(\d+))?")  # another, of `asked_experts`
REPLICATED = PartitionSpec()
SPLIT = PartitionSpec(MESH_AXIS)  # along the first axis, one part a device

Place = jax.Device | jax.sharding.Sharding  # where `jax.device_put` puts an array


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """Several devices that run one program, each on its share of experts and vocabulary.

    An array is either replicated or split: the parts of the devices lie one below the other along
    its first axis, so that a part has the shape that one device alone would have.
    """

    mesh: jax.sharding.Mesh
    splits_heads: bool = False  # whether attention is split by heads, too
    # int32[n, M, R], of each device the experts of each sparse layer that it holds whole
    # (`weights.handed_out`); None: each has a share of every expert
    handed_out: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Devices, in the order of their shares."""
        return tuple(self.mesh.devices.flat)

    @property
    def local(self) -> dict[int, jax.Device]:
        """Devices of this process, by the number of their share; all of them in one process."""
        own = jax.process_index()
        return {i: d for i, d in enumerate(self.devices) if d.process_index == own}

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.mesh.size

    @property
    def num_handed_out(self) -> int:
        """Experts of a layer that each device has whole; 0: shares of all."""
        return 0 if self.handed_out is None else self.handed_out.shape[2]

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of arrays that every device has whole."""
        return NamedSharding(self.mesh, REPLICATED)

    def split(self, memory_kind: str | None = None) -> NamedSharding:
        """Sharding of arrays of which every device has a part; `memory_kind`: None for its own."""
        return NamedSharding(self.mesh, SPLIT, memory_kind=memory_kind)

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Joins arrays of equal shape, one on each of `local`, to a split array; copies nothing."""
        first = parts[0]
        shape = (self.size * first.shape[0], *first.shape[1:])
        sharding = self.split(first.sharding.memory_kind)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    def split_rows(self, arrays: Any) -> Any:
        """Splits arrays [N, ...], or a tree of them, by rows; missing ones are zeros.

        Every device has `rows_of(N, size)` of them.
        """

        def split(array: Any) -> jax.Array:
            missing = self.size * rows_of(len(array), self.size) - len(array)
            padding = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
            padded = np.pad(np.asarray(array), padding)
            return jax.make_array_from_callback(padded.shape, self.split(), padded.__getitem__)

        return jax.tree.map(split, arrays)

    def own(self, arrays: Any) -> Any:
        """Gives every device arrays of its own, equal at first; all have scalars in common."""

        def of_each(array: Any) -> jax.Array:
            host = np.asarray(array)
            if not host.ndim:
                return jax.device_put(host, self.replicated)
            return jax.device_put(np.concatenate([host] * self.size), self.split())

        return jax.tree.map(of_each, arrays)

    def sum_own(self, arrays: Any) -> Any:
        """Sums over the devices what `own` gave each, on the host."""

        def total(array: Any) -> Any:
            host = np.asarray(array)
            return host.reshape(self.size, -1, *host.shape[1:]).sum(axis=0)

        return jax.tree.map(total, arrays)

    def map(self, function: Callable[..., Any], arguments: Any, results: Any) -> Any:
        """Returns `function` of what each device has of the arguments.

        Args:
          arguments: arrays, or trees of them, that say which of them are split.
          results: `REPLICATED` or `SPLIT`, or a tree of them that begins as the results do.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs_of(arguments), out_specs=results,
            check_vma=False,
        )  # fmt: skip


def rows_of(total: int, num_devices: int) -> int:
    """Rows of a matrix of `total` rows that each device of a mesh has."""
    return -(-total // num_devices)


def put(arrays: Any, place: jax.Device | jax.sharding.Sharding) -> Any:
    """Puts an array, or a tree of them, on a device, or whole on each of a mesh's.

    Several processes have equal arrays, which they do not compare, as `jax.device_put` would.
    """
    if isinstance(place, jax.Device) or place.is_fully_addressable:
        return jax.device_put(arrays, place)

    def of_each(array: Any) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, place, host.__getitem__)

    return jax.tree.map(of_each, arrays)


def specs_of(arrays: Any) -> Any:
    """Tree of the specs of arrays on a mesh."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, arrays)


def device_nbytes(arrays: Any) -> int:
    """Bytes that each device has of an array, or of a tree of them."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)


def mesh_of(sharding: jax.sharding.Sharding) -> DeviceMesh | None:
    """Mesh of an array's sharding; None where the array is on one device."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return DeviceMesh(mesh) if isinstance(mesh, jax.sharding.Mesh) else None


def mesh_size(text: str | int) -> int:
    """Number of devices of a mesh.

    Args:
      text: the number, or several numbers that are multiplied: "2", "2,4", 2; "": one device. Words
        of `asked_heads` and `asked_experts` may follow.

    Raises:
      MoejaxError: the text is no such number.
    """
    numbers, words = _parts_of(text)
    known = [word in _ATTENTION or _EXPERTS.fullmatch(word) is not None for word in words]
    # No word stands for a number, or twice.
    is_mesh = all(known) and len({word in _ATTENTION for word in words}) == len(words)
    if not is_mesh or not all(map(int, numbers)) or (words and not numbers):
        raise MoejaxError(
            f"mesh={text!r} must be a number of devices, such as 2, or 2,4 for 8; heads or whole "
            "may follow, and experts, such as 2,heads"
        )
    return math.prod(map(int, numbers))


def asked_heads(text: str | int) -> bool | None:
    """Whether a mesh splits attention by heads: "2,heads" does, "2,whole" does not; else None."""
    return next((_ATTENTION[word] for word in _parts_of(text)[1] if word in _ATTENTION), None)


def asked_experts(text: str | int) -> int | None:
    """How a mesh divides experts: None cuts each of them, as "2" does.

    "2,experts" hands them out whole, as many to each device; for "2,experts+4" each holds 4 of
    every layer more, copies of the hottest.
    """
    found = [match for word in _parts_of(text)[1] if (match := _EXPERTS.fullmatch(word))]
    return int(found[0][1] or 0) if found else None


def _parts_of(text: str | int) -> tuple[list[str], list[str]]:
    """The numbers that a mesh's text begins with, and what follows them."""
    parts = [part.strip() for part in str(text).split(",")] if text else []
    count = next((i for i, part in enumerate(parts) if not part.isdecimal()), len(parts))
    return parts[:count], parts[count:]


def make_mesh(text: str | int, platform: str = "auto") -> DeviceMesh | None:
    """Makes a mesh of the first devices of a platform; None for one device.

    Of several processes (`jax.distributed.initialize`) it has all devices. It splits attention
    where the text says so.

    Raises:
      MoejaxError: as of `mesh_size`, or JAX sees fewer devices, or processes have more.
    """
    count = mesh_size(text)
    if count == 1:
        return None
    platform = choose_device(platform).platform
    devices = jax.devices(platform)
    if jax.process_count() > 1 and len(devices) != count:
        raise MoejaxError(
            f"mesh={text} takes {count} devices, but the {jax.process_count()} processes have "
            f"{len(devices)}, and each has to take part: mesh={len(devices)}"
        )
    if len(devices) < count:
        more = f" (XLA_FLAGS=--xla_force_host_platform_device_count={count} makes CPU devices)"
        more = more if platform == "cpu" else ""
        raise MoejaxError(
            f"mesh={text} takes {count} devices, but JAX sees {len(devices)} of the platform "
            f"{platform}: take a smaller mesh, or leave it out{more}"
        )
    mesh = jax.sharding.Mesh(np.asarray(devices[:count]), (MESH_AXIS,))
    return DeviceMesh(mesh, bool(asked_heads(text)))


@contextlib.contextmanager
def joined_processes(text: str) -> Iterator[None]:
    """Joins this process to others that run the same command; the first one alone prints answers.

    Where another is lost, this one ends with one line and status 1: JAX cannot go on without it,
    and would wait for it at the end.

    Args:
      text: HOST:PORT,NUMBER,INDEX, the first process's address, how many there are, and which this
        is, from 0 on; "auto": as the cluster's launcher says; "": this process is alone.

    Raises:
      MoejaxError: the text is no such place, or the processes do not find each other.
    """
    if not text:
        yield
        return
    try:
        jax.distributed.initialize(**_place_of_process(text), shutdown_timeout_seconds=60)
        index = jax.process_index()
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise MoejaxError(f"processes={text}: they do not find each other ({reason})") from error
    try:
        with Path(os.devnull).open("w") as nowhere:
            muted = contextlib.redirect_stdout(nowhere) if index else contextlib.nullcontext()
            with muted:
                yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        print_stderr(
            f"error: process {index} cannot go on: {reason}; another process of the mesh may be "
            "lost: see what each printed, and start all again"
        )
        sys.stderr.flush()
        os._exit(1)


def _place_of_process(text: str) -> dict[str, Any]:
    """Arguments of `jax.distributed.initialize`; MoejaxError for a text that names no place."""
    if text == "auto":
        return {}
    address, *numbers = text.split(",")
    if ":" not in address or len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
        raise MoejaxError(
            f"processes={text!r} must be HOST:PORT,NUMBER,INDEX, such as 10.0.0.1:9000,2,0 in the "
            "first of two, or auto"
        )
    number, index = map(int, numbers)
    if index >= number:
        raise MoejaxError(f"processes={text}: of {number} the last has the number {number - 1}")
    return {"coordinator_address": address, "num_processes": number, "process_id": index}


def choose_device(platform: str) -> jax.Device:
    """Chooses this process's first device of `platform`; "auto" is JAX's default device.

    Raises:
      MoejaxError: an unknown platform, or one that JAX does not see.
    """
    if platform not in PLATFORMS:
        raise MoejaxError(f"platform {platform!r} is none of {', '.join(PLATFORMS)}")
    try:
        return jax.local_devices(backend=None if platform == "auto" else platform)[0]
    except (RuntimeError, AssertionError) as error:  # the latter: CUDA alone, and no driver
        raise MoejaxError(_why_none(platform, error)) from error


def check_dtype(dtype: str, platform: str) -> None:
    """Raises MoejaxError for a dtype that the platform cannot multiply.

    XLA on a CPU has no product of float16 that is summed in float32 (jaxlib 0.10.2).
    """
    if dtype == "float16" and platform == "cpu":
        raise MoejaxError("dtype=float16 does not run on a CPU: take float32 or bfloat16")


def _why_none(platform: str, error: Exception) -> str:
    """Explains a missing device: the requested platform, JAX's own limits, and what exists."""
    asked = f"platform {platform!r} was asked for"
    if allowed := jax.config.values["jax_platforms"]:
        asked += f", and JAX may use only {allowed!r} (JAX_PLATFORMS)"
    try:
        seen = ", ".join(sorted({device.platform for device in jax.devices()}))
    except (RuntimeError, AssertionError):
        reason = str(error).partition("\n")[0] or "none of it could be started"
        return f"{asked}, but JAX has no device: {reason}"
    mend = "choose another platform"
    if platform == "gpu":
        mend = (
            "on an NVIDIA machine pip install '.[cuda13]' (or '.[cuda12]') in a clone of this "
            "repository, or use platform 'cpu'"
        )
    return f"{asked}, but JAX sees only {seen}; {mend}"


@contextlib.contextmanager
def plain_memory_errors(device: jax.Device, *, waits: bool = False) -> Iterator[None]:
    """Turns the runtime's out-of-memory error into a MoejaxError of one line.

    With `waits` also that of one of several GPUs, which fails or waits for another in vain. And
    that with which the collectives of JAX 0.12 failed on a machine.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
        if "ncclGetPeerDevicePointer" in reason:
            raise MoejaxError(
                f"the collectives of JAX {jax.__version__} failed between these GPUs "
                "(ncclGetPeerDevicePointer): install jax[cuda13]==0.11.2 or jax[cuda12]==0.11.2, "
                "which has others"
            ) from error
        if "RESOURCE_EXHAUSTED" not in str(error):
            if not waits or "CUDA_ERROR" not in str(error):
                raise
            raise MoejaxError(
                f"a GPU of the mesh failed, or another waited for it for a minute ({reason}): "
                "start again, on other GPUs if it fails again"
            ) from error
        raise MoejaxError(
            f"{device} is out of memory ({reason}): take a shorter context, fewer prompts at once, "
            f"a smaller dtype or a smaller model"
        ) from error


def user_cache(name: str) -> Path:
    """Folder $XDG_CACHE_HOME/moejax/`name`, or in ~/.cache, of what is compiled for this user.

    Raises:
      RuntimeError: there is no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moejax" / name


def enable_compilation_cache(directory: str) -> Path | None:
    """Keeps compiled programs on disk, so that the next process starts in seconds.

    Args:
      directory: "auto" is `user_cache("xla")`, "" is off. A directory that the process
        has already set takes precedence over "auto".

    Returns:
      The directory, or None when it is off.

    Raises:
      MoejaxError: the directory cannot be written.
    """
    given = jax.config.values["jax_compilation_cache_dir"]
    if not directory:
        _keep_programs_in(None)
        return None
    if directory == "auto" and given:
        return Path(given)
    try:
        path = user_cache("xla") if directory == "auto" else Path(directory).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        place = directory if isinstance(error, RuntimeError) else path
        raise MoejaxError(
            f"the compilation cache {place} cannot be used ({reason}); name a directory that can "
            'be written in compilation_cache, or "" for none'
        ) from error
    _keep_programs_in(path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path


def _keep_programs_in(path: Path | None) -> None:
    jax.config.update("jax_compilation_cache_dir", None if path is None else str(path))
    compilation_cache.reset_cache()  # JAX opens it once, and would go on with the place before
