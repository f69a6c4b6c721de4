"""ZeRO as DeepSpeed knows it: what may be asked for, what contradicts itself, and the dict that DeepSpeed is given."""
