"""The MoE layer and its parts; one idea a file."""
