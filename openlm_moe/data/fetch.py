"""Downloads the remote shards that will be needed next, in the background, so that no step waits for a whole window."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from openlm_moe.data.manifest import Shard, Source
from openlm_moe.data.order import SourceOrder
from openlm_moe.data.reader import ShardReader
from openlm_moe.data.remote import is_remote
from openlm_moe.errors import UserError


class FetchAhead:
    """Watches how far a run is in each source and fetches this window's shards and the next one's."""

    def __init__(self, sources: Sequence[Source], orders: Sequence[SourceOrder], reader: ShardReader) -> None:
        self.sources = tuple(sources)
        self.orders = tuple(orders)
        self.reader = reader
        self.remote = [is_remote(source.shards[0].url) for source in sources]
        self.edges = [-1] * len(self.sources)

    def note(self, reached: Sequence[int]) -> None:
        """`reached[i]`: the index that the run has come to in source i."""
        for number, index in enumerate(reached):
            if not self.remote[number] or index < self.edges[number]:
                continue
            self.edges[number], now = self.orders[number].window(index)
            following = self.orders[number].window(self.edges[number])[1]
            shards = [self.sources[number].shards[shard] for shard in dict.fromkeys([*now, *following])]
            # Processes start at different places, so that they share the work instead of waiting for one another.
            turn = os.getpid() % len(shards)
            threading.Thread(target=self._fetch, args=(shards[turn:] + shards[:turn],), daemon=True).start()

    def _fetch(self, shards: list[Shard]) -> None:
        for shard in shards:
            with contextlib.suppress(UserError):  # whoever reads the shard gets the same error and reports it
                self.reader.fetch(shard)
