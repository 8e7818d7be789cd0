"""Reading torch.distributed.checkpoint files without unpickling anything that could run code.

The format's own index (`.metadata`) and its non-tensor values are pickles, and torch opens both without restriction.
Here the index may name only the handful of plain classes it is made of, and values load with `weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from openlm_moe.errors import UserError

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"a checkpoint index must not name {module}.{name}")


def read_index(folder: Path | str) -> Metadata:
    """The index of the checkpoint in `folder`: which tensors it holds and where.

    Raises `pickle.UnpicklingError` if it names anything but plain metadata or files outside of `folder`.
    """
    with open(Path(folder) / ".metadata", "rb") as file:
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"a checkpoint index must hold Metadata, not {type(index).__name__}")
    for info in (index.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path:
            raise pickle.UnpicklingError(f"a checkpoint index must not point outside its folder: {info.relative_path}")
    return index


class SafeReader(FileSystemReader):
    """`FileSystemReader` whose index is read by `read_index`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(self.path)
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index


class SafeLoadPlanner(DefaultLoadPlanner):
    """`DefaultLoadPlanner` whose non-tensor values load with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_tensors(
    state: dict[str, Any], folder: Path | str, process_group: dist.ProcessGroup | None = None, alone: bool = False
) -> None:
    """Fills the nested `state` in place from the checkpoint in `folder`; `alone` for one process without the others.

    Raises `UserError` if any rank cannot read its part.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader, planner = SafeReader(folder), SafeLoadPlanner()
            dcp.load(state, storage_reader=reader, planner=planner, process_group=process_group, no_dist=alone)
    except CheckpointException as error:  # not an Exception: nobody would expect it
        first = next(iter(error.failures.values()))[0]
        raise UserError(f"checkpoint {folder} cannot be read: {why_refused(first)}; use an older one") from first


def why_refused(error: BaseException) -> str:
    """Why a file was not read, in one line. Of torch's refusals without their advice to run whatever it holds."""
    text = str(error).strip()
    if "Weights only load failed" in text:
        named = re.search(r"GLOBAL ([\w.]+)", text)
        return f"it holds {named[1] if named else 'something'}, which is neither a tensor nor a plain value"
    return text.partition("\n")[0] or type(error).__name__
