"""The console: a progress bar on a terminal, plain lines anywhere else, and the same lines in out.log."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from openlm_moe.telemetry import metrics

LOG_FILE = "out.log"


def short(number: float) -> str:
    """1234567 -> '1.23M': three significant digits and a suffix."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit * 0.9995:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """3725 -> '1:02:05'; days are counted in hours."""
    minutes, secs = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def summary(record: dict[str, Any], total_tokens: int | None = None) -> list[str]:
    """The parts of one console line, in reading order; what the record does not hold is left out."""
    parts = []

    def add(name: str, label: str, spec: str) -> None:
        if name in record:
            parts.append(f"{label} {format(record[name], spec) if spec else short(record[name])}")

    add(metrics.LOSS, "loss", ".4f")
    add(metrics.PERPLEXITY, "ppl", "")
    add(metrics.TOKENS_PER_SECOND, "tokens/s", "")
    add(metrics.MFU, "mfu", ".1%")
    add(metrics.LR, "lr", ".2e")
    add(metrics.GRAD_NORM, "grad norm", ".2f")
    add(metrics.LOAD_BALANCING_LOSS, "balance", ".4f")
    add(metrics.ROUTER_Z_LOSS, "z", ".2e")
    if metrics.MAX_VIOLATION in record:
        parts.append(f"load max/mean {record[metrics.MAX_VIOLATION] + 1:.2f}")
    if record.get(metrics.DROPPED_FRACTION):
        add(metrics.DROPPED_FRACTION, "dropped", ".1%")
    for name, value in record.items():
        if (valid := metrics.parse_valid_metric(name)) and isinstance(value, float):
            parts.append(
                f"{valid[0]} {valid[1]} {value:.4f}" if valid[1] == "loss" else f"{valid[0]} ppl {short(value)}"
            )
    rate = record.get(metrics.TOKENS_PER_SECOND)
    if total_tokens and rate:
        parts.append(f"eta {duration((total_tokens - record[metrics.TOKENS]) / rate)}")
    return parts


def plain_line(record: dict[str, Any], total_tokens: int | None = None) -> str:
    """One line for a log: step, tokens, then `summary`."""
    tokens = short(record[metrics.TOKENS])
    if total_tokens:
        tokens += f"/{short(total_tokens)}"
    return " | ".join([f"step {record[metrics.STEP]}", f"tokens {tokens}", *summary(record, total_tokens)])


class Console:
    """Shows records on `stream` and appends them as plain lines, with the time of day, to `folder`/out.log."""

    def __init__(
        self, folder: Path, total_tokens: int | None = None, tokens: int = 0, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stdout
        self._total = total_tokens
        self._log = (folder / LOG_FILE).open("a", encoding="utf-8", buffering=1)
        self._bar: tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_tokens, initial=tokens, unit="tok", unit_scale=True, dynamic_ncols=True, file=self._stream
            )

    def log(self, record: dict[str, Any]) -> None:
        line = plain_line(record, self._total)
        self._write_log(line)
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        elif any(metrics.parse_valid_metric(name) for name in record):
            self._bar.write(line, file=self._stream)
        else:
            parts = [p for p in summary(record) if not p.startswith("tokens/s")]  # the bar has its own rate
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
            self._bar.update(max(record[metrics.TOKENS] - self._bar.n, 0))
            self._bar.refresh()

    def say(self, text: str) -> None:
        """Prints `text` above the bar, and into out.log."""
        self._write_log(text)
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def _write_log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def close(self, exit_code: int = 0) -> None:
        if self._bar is not None:
            self._bar.close()
        self._log.close()
