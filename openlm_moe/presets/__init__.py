"""Ready configurations, one YAML file a name, for `--config NAME`."""
