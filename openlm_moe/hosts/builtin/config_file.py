"""--config: flags from a YAML or JSON file, or from a preset that ships with the package."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin import legacy
from openlm_moe.options import Option, unknown_flag_message


def read(source: str, options: Sequence[Option]) -> dict[str, Any]:
    """{dest: value} of the file or preset `source`. Keys are flags without dashes in front, aliases included.

    Raises `UserError` naming the key for one that no option has, or for a value of another type.
    """
    path = find(source)
    by_name = {name.lstrip("-"): o for o in options for name in (o.flag, *o.aliases)}
    values: dict[str, Any] = {}
    for key, value in _load(path).items():
        name = str(key).replace("_", "-")
        if message := legacy.gone(f"--{name}"):
            raise UserError(f"{path}: {message}")
        if name not in by_name:
            raise UserError(f"{path}: {unknown_flag_message(f'--{name}', [f'--{known}' for known in by_name])}")
        values[by_name[name].dest] = _convert(by_name[name], value, path)
    return values


def presets() -> dict[str, Path]:
    """{name: file} of the presets in the package."""
    folder = Path(str(resources.files("openlm_moe") / "presets"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(source: str) -> Path:
    """The file that `source` names: a path, or a preset's name."""
    if Path(source).is_file():
        return Path(source)
    known = presets()
    if source in known:
        return known[source]
    raise UserError(f"--config {source} is neither a file nor a preset; presets are {', '.join(known) or 'none'}")


def _load(path: Path) -> dict[str, Any]:
    text = path.read_text()
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON: {error}") from None
    else:
        try:
            import yaml
        except ImportError:
            raise UserError('--config with YAML needs PyYAML: pip install "openlm-moe[config]", or give JSON') from None
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content or {}, dict):
        raise UserError(f"{path} must hold a mapping of flags to values, not a {type(content).__name__}")
    return content or {}


def _convert(option: Option, value: Any, path: Path) -> Any:
    if value is None:
        return None
    if option.type is bool:
        if not isinstance(value, bool):
            raise UserError(f"{path}: {option.flag} is {value!r}; it must be true or false")
        return value
    if option.nargs is None and isinstance(value, list) and option.dest != "moe_layers":
        raise UserError(f"{path}: {option.flag} is a list; it must be one value")
    if option.nargs is not None:
        return [_convert_one(option, part, path) for part in (value if isinstance(value, list) else [value])]
    return _convert_one(option, value, path)


def _convert_one(option: Option, value: Any, path: Path) -> Any:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        out = option.type(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise UserError(
            f"{path}: {option.flag} is {value!r}, which is not a {option.type.__name__.strip('_')}"
        ) from None
    if option.choices is not None and out not in option.choices:
        raise UserError(f"{path}: {option.flag} is {value!r}; it must be one of {', '.join(map(str, option.choices))}")
    return out
