"""Chooses the reader of a format by a checkpoint's quantization_config."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moejax.checkpoints.formats import config_fields as settings
from moejax.checkpoints.formats.awq import parse_awq
from moejax.checkpoints.formats.compressed_tensors import parse_compressed_tensors
from moejax.checkpoints.formats.fp8 import parse_fp8
from moejax.checkpoints.formats.gptq import gptq_format, parse_gptq
from moejax.checkpoints.formats.hqq import parse_hqq
from moejax.checkpoints.formats.interfaces import Format
from moejax.checkpoints.formats.manifest import METHOD, check_files, read_manifest
from moejax.checkpoints.formats.mxfp4 import parse_mxfp4
from moejax.checkpoints.formats.native import native_format
from moejax.errors import MoejaxError
from moejax.models.hf.config import read_json

_AUTOROUND = ("auto-round", "auto_round", "autoround", "intel/auto-round")
_PARSERS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "gptq": parse_gptq,
    "awq": parse_awq,
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
    "hqq": parse_hqq,
    "mxfp4": parse_mxfp4,
}
# Where GPTQ and AWQ kept their settings before config.json had a place for them.
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
SUPPORTED = (METHOD, *_PARSERS, "auto-round")


def quantization_fields(directory: Path) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint, MoejaxError if broken; None if there is none."""
    fields = read_json(directory / "config.json").get("quantization_config")
    if fields is None:
        for name, method in _OLD_FILES.items():
            if (directory / name).is_file():
                return _old_fields(read_json(directory / name), method)
        return None
    if not isinstance(fields, dict):
        raise MoejaxError(
            f"{directory / 'config.json'}: quantization_config is {fields!r}, expected an object"
        )
    return fields


def open_format(directory: Path, fields: Mapping[str, Any], *, read_bits: int = 0) -> Format:
    """Opens the reader of a format by its quantization_config; MoejaxError if it cannot be read.

    File sizes of the package's own format are compared with its manifest; `verify_checkpoint`
    compares the contents. `read_bits`: see `native_format`.
    """
    method = settings.text(fields, "quant_method")
    if method == METHOD:
        manifest = read_manifest(directory, fields)
        check_files(manifest, checksums=False)
        return native_format(manifest, read_bits)
    try:
        if method in _AUTOROUND:
            return _parse_autoround(fields)
        if method in _PARSERS:
            return _PARSERS[method](fields)
    except MoejaxError as error:
        raise MoejaxError(f"{directory / 'config.json'}: {error}") from error
    raise MoejaxError(
        f"{directory / 'config.json'}: quantization_config has quant_method "
        f"{fields.get('quant_method')!r}; supported are {', '.join(SUPPORTED)}"
    )


def _parse_autoround(fields: Mapping[str, Any]) -> Format:
    """AutoRound packs as GPTQ or AWQ does; its own packing is GPTQ's with true zero points."""
    packing = settings.text(fields, "packing_format", "backend", default="auto_round:auto_gptq")
    if settings.text(fields, "data_type", default="int") != "int":
        raise MoejaxError(
            f"quantization_config.data_type is {fields['data_type']!r}, only 'int' is"
        )
    if "awq" in packing:
        return parse_awq({**fields, "version": "gemm"})
    if "gptq" not in packing and packing.partition(":")[0] not in _AUTOROUND:
        raise MoejaxError(
            f"quantization_config has packing_format {packing!r}; of auto-round, those of gptq and "
            "awq can be read"
        )
    overrides = []
    for name, changed in settings.mapping(fields, "extra_config").items():
        if isinstance(changed, dict):
            # Names of modules; where they hold more than that, expressions.
            expression = f"(?:{name})$"
            overrides.append((settings.pattern("extra_config", expression), changed))
    return gptq_format(fields, overrides, is_v1="gptq" in packing)


def _old_fields(fields: dict[str, Any], method: str) -> dict[str, Any]:
    renamed = {"w_bit": "bits", "q_group_size": "group_size"}
    return {"quant_method": method} | {renamed.get(k, k): v for k, v in fields.items()}
