"""Model families, one file each. The contract of such a file (only `build` and `initialise` import torch):

`Shape`                                     a frozen pydantic model of the architecture's sizes
`from_hugging_face(config)`                 a Shape from the dict of a Hugging Face config.json
`token_kinds(shape)`                        the kinds of tokens in a sample: which objectives can be learned
`parameter_count(shape)`                    trainable parameters
`training_flops(shape, encoder, decoder)`   matmul FLOPs of forward and backward for one sample (model FLOPs)
`recomputed_flops(shape, encoder, decoder, dropout=, precision=)`
                                            what activation checkpointing adds (hardware FLOPs − model FLOPs)
`build(spec, construction)`                 the uninitialised module. The family imports its libraries, then builds
                                            inside `construction`, the engine's context: under deepspeed.zero.Init
                                            an import of a model class raises, so the order is the family's to keep
`initialise(module, spec, whole)`           every weight from (seed, name); `whole` is the engine's

Packages in this folder hold what families are built of and are no families.
"""

import hashlib

from bench import plugins
from bench.plugins import FamilyPlugin


def load(family: str) -> FamilyPlugin:
    """Return the family file named `family`; raise UserError if there is none."""
    return plugins.load(plugins.FAMILY, family)


def derived_seed(seed: int, name: str) -> int:
    """Return a generator's seed for one of the purposes of `seed`: the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
