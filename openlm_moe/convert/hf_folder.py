"""Hugging Face folders on disk: config.json and safetensors, in one file or in shards with an index.

Tensors are read, and written, one at a time: no file is ever held whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openlm_moe.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# safetensors' names of the dtypes that weights may have here
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Spec:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Weights:
    """The tensors of a folder: `shapes` and `dtypes` by name, from the files' headers. Raises `UserError`."""

    def __init__(self, folder: Path) -> None:
        _need_safetensors()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Path] = {}
        for path in _weight_files(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    if name in self._files:
                        raise UserError(f"{name} is both in {self._files[name].name} and in {path.name} of {folder}")
                    part = file.get_slice(name)
                    if part.get_dtype() not in _DTYPES:
                        raise UserError(
                            f"{name} in {path} is stored as {part.get_dtype()}; only {', '.join(_DTYPES)} can be "
                            "converted: save the model unquantized"
                        )
                    self._files[name] = path
                    self.shapes[name] = tuple(part.get_shape())
                    self.dtypes[name] = _DTYPES[part.get_dtype()]

    def read(self, name: str) -> Tensor:
        """One tensor. The file is mapped only as long as the tensor lives, so that memory stays bounded."""
        with _opened(self._files[name]) as file:
            return file.get_tensor(name)


def read_config(folder: Path) -> dict[str, Any]:
    """The values in config.json. Raises `UserError`."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no Hugging Face folder: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}; it must hold one JSON object")
    return config


def write_weights(folder: Path, specs: list[Spec], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Writes `tensors`, which may come in any order, as the files that `specs` make; returns how many files.

    A shard takes tensors in the order of `specs` up to `shard_bytes`, at least one. Raises `UserError` unless each of
    `specs` comes exactly once.
    """
    shards = _shards(specs, shard_bytes)
    single = len(shards) == 1
    files = [SINGLE if single else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    places: dict[str, tuple[str, int, Spec]] = {}
    for name, shard in zip(files, shards, strict=True):
        # the widest first, as the library writes them: each tensor then starts at a multiple of its item's size
        places |= _write_header(folder / name, sorted(shard, key=lambda spec: -spec.dtype.itemsize))
    for name, value in tensors:
        path, offset, spec = places.pop(name)
        data = value.to(spec.dtype).contiguous()
        if tuple(data.shape) != spec.shape:
            raise UserError(f"{name} is {tuple(data.shape)}, not {spec.shape} as announced")
        with open(path, "r+b") as file:
            file.seek(offset)
            data.view(-1).view(torch.uint8).numpy().tofile(file)
    if places:
        raise UserError(f"no value came for {', '.join(sorted(places))}")
    if not single:
        index = {
            "metadata": {"total_size": sum(spec.size for spec in specs)},
            "weight_map": {spec.name: name for name, shard in zip(files, shards, strict=True) for spec in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(files)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "200MB", "1GiB" or a plain number. Raises `ValueError`, as argparse expects."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(text)
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}; save the model's weights as safetensors")
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is no index of safetensors files ({error!r})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{folder / INDEX} names the file {name!r}, which is not in the folder; fetch it again")
    return [folder / name for name in names]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}; fetch it again") from None


def _need_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise UserError('safetensors is not installed: pip install "openlm-moe[hf]"') from None


def _shards(specs: list[Spec], shard_bytes: int) -> list[list[Spec]]:
    shards: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.size > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.size
    return shards


def _write_header(path: Path, specs: list[Spec]) -> dict[str, tuple[Path, int, Spec]]:
    """Starts a safetensors file: 8 bytes of length, the header as JSON, and room; returns where each tensor goes.

    The library writes whole files from memory; the format (github.com/huggingface/safetensors) is simple enough to
    write one tensor at a time. The header is padded so that data starts at a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size],
        }
        offset += spec.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(start + offset)
    return {spec.name: (path, start + header[spec.name]["data_offsets"][0], spec) for spec in specs}
