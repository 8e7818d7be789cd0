"""Data: shards and manifests in open_lm's format, the loader, `prepare`, and the embedded corpus."""
