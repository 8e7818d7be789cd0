"""--profile: a trace of a few steps, and where the memory went, in the run's folder."""

from __future__ import annotations

from pathlib import Path

import torch

SKIPPED = 3  # steps before the recorded ones: compilation and allocation settle
RECORDED = 3


class Profiler:
    """Records steps 4 to 6 after the start on rank 0; `step` is called after each. Does nothing unless `active`.

    Writes profile/trace.json (chrome://tracing, Perfetto), profile/operators.txt, and on a GPU
    profile/memory.pickle (pytorch.org/memory_viz).
    """

    def __init__(self, folder: Path, active: bool, device: torch.device) -> None:
        self.folder = folder / "profile"
        self.device = device
        self.files: list[Path] = []
        self._profile: torch.profiler.profile | None = None
        if not active:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
            record_shapes=True,
        )
        self._profile.start()

    def step(self) -> None:
        """One training step is done."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, profile: torch.profiler.profile) -> None:
        trace, table = self.folder / "trace.json", self.folder / "operators.txt"
        profile.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        by_memory = "self_cuda_memory_usage" if self.device.type == "cuda" else "self_cpu_memory_usage"
        averages = profile.key_averages(group_by_input_shape=False)
        table.write_text(
            f"{averages.table(sort_by=order, row_limit=40)}\n{averages.table(sort_by=by_memory, row_limit=40)}\n"
        )
        self.files = [trace, table]
        if self.device.type == "cuda":
            snapshot = self.folder / "memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            self.files.append(snapshot)
