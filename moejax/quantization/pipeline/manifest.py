"""Files beside the quantized weights: quantization.json, the index, config.json."""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moejax.checkpoints.formats.manifest import MANIFEST_FILE
from moejax.files.small import check_regular
from moejax.files.whole import WrittenFile, write_whole
from moejax.models.leaf_kinds import KINDS
from moejax.text.tokenizer import TOKENIZER_FILES
from pallas_kernels import layout

CONFIG_FILE = "config.json"
# The remedy where the disk is full.
RESUME = "make room and start the same command again, it goes on from here"
# Files beside the weights in Hugging Face directories that other engines read too.
COPIED_FILES = (
    *TOKENIZER_FILES,
    "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.json",
)  # fmt: skip

Record = Mapping[str, Any]


def check_other_files(source: Path) -> None:
    """Raises MoejaxError if one of `COPIED_FILES` is not a regular file."""
    for name in COPIED_FILES:
        if (source / name).exists():
            check_regular(source / name, (source / name).stat().st_mode)


def copy_other_files(source: Path, output: Path) -> dict[str, WrittenFile]:
    """Copies tokenizer and generation settings; returns sizes and digests by name."""
    return {
        name: write_whole(output / name, (source / name).read_bytes(), RESUME)
        for name in COPIED_FILES
        if (source / name).is_file()
    }


def totals(records: Mapping[str, Record]) -> dict[str, Any]:
    """Totals over the whole model, by the records of all tensors; plain ones have no "bits".

    Weights, quantized weights and their share, bytes, bits per weight with everything counted,
    for all tensors and for the quantized ones; weights and bytes by class; number of matrices
    with surging factors or too few tokens.
    """
    by_class: dict[str, list[Record]] = defaultdict(list)
    for record in records.values():
        by_class[record["class"]].append(record)
    quantized = [record for record in records.values() if "bits" in record]
    all_weights, all_bytes = _sums(records.values()).values()
    some_weights, some_bytes = _sums(quantized).values()
    return {
        "weights": all_weights,
        "quantized_weights": some_weights,
        "quantized_share": some_weights / all_weights,
        "bytes": all_bytes,
        "bits_per_weight": 8 * all_bytes / all_weights,
        "quantized_bytes": some_bytes,
        "quantized_bits_per_weight": 8 * some_bytes / max(1, some_weights),
        "classes": {kind: _sums(by_class[kind]) for kind in KINDS if kind in by_class},
        "surged_matrices": sum(record.get("surged", False) for record in quantized),
        "starved_matrices": sum(record.get("starved", False) for record in quantized),
    }


def write_manifest(
    output: Path,
    *,
    made_of: Mapping[str, Any],
    records: Mapping[str, Record],
    files: Mapping[str, WrittenFile],
) -> None:
    """Writes quantization.json, a line for each tensor and for each of `files`, but this one."""
    quantized = {name: record for name, record in records.items() if "bits" in record}
    plain = {name: record for name, record in records.items() if "bits" not in record}
    sizes = {name: file._asdict() for name, file in files.items()}
    parts = [
        f'"layout": {_json(layout.LAYOUT)}',
        f'"totals": {_json(totals(records))}',
        f'"made_of": {_json(made_of)}',
        *(
            f'"{title}": {{\n{_lines(entries)}\n}}'
            for title, entries in (("files", sizes), ("tensors", quantized), ("plain", plain))
        ),
    ]
    write_whole(output / MANIFEST_FILE, "{\n" + ",\n".join(parts) + "\n}\n", RESUME)


def _lines(entries: Mapping[str, Record]) -> str:
    return ",\n".join(f" {_json(name)}: {_json(entry)}" for name, entry in entries.items())


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _sums(records: Collection[Record]) -> dict[str, int]:
    weights = sum(math.prod(record["shape"]) for record in records)
    return {"weights": weights, "bytes": sum(record["bytes"] for record in records)}
