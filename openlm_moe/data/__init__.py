"""Data: shards and manifests in open_lm's format, the loader, `prepare`, and the embedded corpus.

    loader.open_data            training data: `batches(...)`, `require(n)`, `state(n)` and `resume(state)`
    evaluation.open_evaluation  validation sets
    corpus.embedded_corpus      Python's standard library as shards, where no data are given
    prepare                     `python -m openlm_moe.data.prepare`: text, JSON lines, parquet -> shards and manifest
    ngram                       what counting alone achieves on the same samples

Below them: sources (expand, check, count) -> manifest, reader -> shards (tar), remote (fsspec, local copies), cache;
order (which sample stands where), samples (exact length, batches), batches (worker processes).
"""
